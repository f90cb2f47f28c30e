"""`configs/smollm2_terminal.yaml`, cut down to one small step: a real model, real tools, a model folder at the end."""

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from hermes_jax.config import load
from hermes_jax.models import load_tokenizer
from hermes_jax.playing import system_prompt
from hermes_jax.rollout.chat import ChatRenderer
from hermes_jax.rollout.environment import load_environment
from hermes_jax.telemetry import load_episodes, read_metrics
from hermes_jax.tools.registry import resolve_toolsets

REPOSITORY = Path(__file__).parent.parent
CONFIG = REPOSITORY / "configs" / "smollm2_terminal.yaml"
SMALL = {
    "env.total_steps": 1,
    "env.groups_per_step": 2,
    "env.group_size": 2,
    "env.eval_episodes": 0,
    "env.max_token_length": 48,
    "warm_start.steps": 1,
    "warm_start.episodes_per_step": 2,
    "openai.slots": 4,
}


@pytest.fixture(scope="module")
def run(smollm2, tmp_path_factory):
    """The folder of a finished run."""
    folder = tmp_path_factory.mktemp("smollm2") / "run"
    options = {**SMALL, "model.path": smollm2, "run_dir": folder}
    done = subprocess.run(
        [sys.executable, "-m", "hermes_jax.train", "--config", CONFIG, *(f"{k}={v}" for k, v in options.items())],
        env={**os.environ, "JAX_PLATFORMS": "cpu"},
        cwd=REPOSITORY,
        capture_output=True,
        text=True,
        timeout=1800,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return folder


@pytest.fixture(scope="module")
def metrics(run):
    """Numbers of step 1 by phase; a step may have several rows."""
    found = {"warm_start": {}, "train": {}}
    for row in read_metrics(run / "metrics.jsonl"):
        assert row.pop("step") == 1
        found[row.pop("phase")] |= row
    return found


@pytest.fixture(scope="module")
def episodes(run):
    return list(load_episodes(run, step=1, kind="train"))


def test_every_metric_is_finite(metrics):
    for numbers in metrics.values():
        assert numbers
        assert np.isfinite(list(numbers.values())).all(), numbers


def test_the_step_was_trained_within_the_memory_limit(metrics):
    train = metrics["train"]
    assert train["train/episodes"] == 4
    assert train["update/count"] == load(CONFIG).grpo.iterations_per_batch
    assert train["update/skipped_total"] == 0
    assert train["system/host_memory"] < 12 * 2**30


def test_masks_cover_exactly_the_sampled_tokens(episodes, smollm2):
    tokenizer = load_tokenizer(smollm2)
    assert len(episodes) == 4
    for episode in episodes:
        (trajectory,) = episode["trajectories"]
        mask, turn = trajectory["mask"], trajectory["turn"]
        replies = [message for message in episode["messages"] if message["role"] == "assistant"]
        assert mask.sum() == episode["counters"]["sampled_tokens"]
        assert len(replies) == episode["counters"]["turns"] == turn.max() + 1
        assert (mask == (turn >= 0)).all()
        assert (trajectory["logprobs"][~mask] == 0).all()
        for number, reply in enumerate(replies):
            sampled = tokenizer.decode(trajectory["tokens"][turn == number])
            assert reply["content"].strip() in sampled
            assert sampled.count("<|im_end|>") == sampled.endswith("<|im_end|>")


def test_prompts_are_what_the_chat_template_makes_of_the_messages(episodes, smollm2):
    config = load(CONFIG)
    tools = [tool.schema() for tool in resolve_toolsets(config.env.enabled_toolsets, ()).values()]
    renderer = ChatRenderer(load_tokenizer(smollm2), tools=tools)
    system = system_prompt(config, load_environment(config.env.name), tools)
    assert '{"name": "terminal", "description"' in system
    for episode in episodes:
        first = episode["messages"][:2]
        assert [message["role"] for message in first] == ["system", "user"]
        assert first[0]["content"] == system
        (trajectory,) = episode["trajectories"]
        prompt = trajectory["tokens"][: int(np.argmax(trajectory["mask"]))]
        assert prompt.tolist() == renderer.encode(renderer.render(first))


def test_the_exported_model_loads_in_transformers(run, smollm2):
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    loaded, found = transformers.AutoModelForCausalLM.from_pretrained(
        run / "final", dtype=torch.float32, output_loading_info=True
    )
    assert not any(found[kind] for kind in ("missing_keys", "unexpected_keys", "mismatched_keys")), found
    before = transformers.AutoModelForCausalLM.from_pretrained(smollm2, dtype=torch.float32)
    moved = [(a - b).abs().max().item() for a, b in zip(loaded.parameters(), before.parameters(), strict=True)]
    assert 0 < max(moved) < 0.01  # trained, a little
    assert load_tokenizer(run / "final").chat_template == load_tokenizer(smollm2).chat_template
