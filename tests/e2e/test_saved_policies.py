"""What a run leaves can be evaluated, exported and loaded, and is always the same policy."""

from __future__ import annotations

import json
import shutil
import site
import subprocess
import sys
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest

from hermes_jax.models import forward, head_weight, load_model, logits
from hermes_jax.telemetry.episodes import ARRAYS, load_episodes
from tests.e2e.runs import PROJECT, Command, metrics


@pytest.mark.parametrize("what", ["run", "checkpoint", "model"])
def test_evaluation_equals_the_one_of_the_run(what: str, straight: Path, command: Command, tmp_path: Path) -> None:
    path, config = {
        "run": (straight, ()),
        "checkpoint": (straight / "checkpoints" / "6", ()),
        "model": (straight / "final", ("--config", straight / "config.yaml")),
    }[what]
    done = command.run("evaluate", path, *config, "--json", "--episodes", tmp_path)
    found, report = json.loads(done.out), json.loads((straight / "report.json").read_text())
    assert found.pop("step") == (0 if what == "model" else 6)
    del found["eval/seconds"], report["after"]["eval/seconds"]
    assert found == report["after"]
    assert found["eval/episodes"] == 8
    same = 0
    for one, other in zip(load_episodes(tmp_path), load_episodes(straight, step=6), strict=False):
        if other["kind"] == "train":
            continue
        same += 1
        assert one["messages"] == other["messages"]
        assert one["reward"] == other["reward"]
        for a, b in zip(one["trajectories"], other["trajectories"], strict=True):
            for name in ARRAYS.keys() - {"policy_version"}:
                np.testing.assert_array_equal(a[name], b[name])
    assert same == 8


def test_a_model_folder_needs_no_config_file(straight: Path, command: Command, tmp_path: Path) -> None:
    """What it is evaluated on can be said in overrides; the context is as long as the model's positions allow."""
    play = ("env.name=pick", "env.enabled_toolsets=[terminal]", "env.max_token_length=40", "env.max_agent_turns=3")
    small = ("env.eval_episodes=2", "openai.slots=4", "openai.prefill_chunk=32")
    done = command.run("evaluate", straight / "final", *play, *small, "--json", "--episodes", tmp_path)
    assert json.loads(done.out)["eval/episodes"] == 4
    config, _ = load_model(straight / "final")
    too_long = f"model.context_length={config.max_length + 1}"
    error = command.run("evaluate", straight / "final", *play, *small, too_long, status=1).error
    assert f"model.context_length is {config.max_length + 1}, but {straight / 'final'} was made for" in error
    assert "lower model.context_length" in error


def test_an_earlier_checkpoint_is_another_policy(straight: Path, command: Command) -> None:
    done = command.run("evaluate", straight / "checkpoints" / "3", "--json")
    assert json.loads(done.out)["step"] == 3


def test_export_loads_in_transformers_with_the_same_logits(straight: Path, command: Command, tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    done = command.run("export", straight, "--to", tmp_path / "exported")
    assert done.out == f"step 6 of {straight} written to {tmp_path / 'exported'}\n"
    model, info = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path / "exported", output_loading_info=True, dtype=torch.float32
    )
    assert not info["missing_keys"]
    assert not info["unexpected_keys"]
    assert not info["mismatched_keys"]
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path / "exported")
    prompt = tokenizer.apply_chat_template([{"role": "user", "content": "say a 7"}], add_generation_prompt=True)
    ids = np.asarray(getattr(prompt, "input_ids", prompt))
    with torch.no_grad():
        theirs = model(torch.tensor(ids[None])).logits[0].numpy()
    for folder in (tmp_path / "exported", straight / "final"):
        config, params = load_model(folder)
        hidden, _ = forward(
            params, config, jnp.asarray(ids[None]), jnp.arange(len(ids))[None], jnp.ones((1, len(ids)), jnp.int32)
        )
        np.testing.assert_allclose(logits(hidden[0], head_weight(params)), theirs, atol=2e-5)


WITHOUT_TORCH = """
import importlib.util, sys
sys.path[:0] = sys.argv[1:3]
assert importlib.util.find_spec("torch") is None
module = importlib.import_module(sys.argv[3])
sys.argv[:4] = sys.argv[3:4]
sys.exit(module.main())
"""


def test_nothing_is_said_about_a_torch_that_nobody_needs(straight: Path, command: Command, tmp_path: Path) -> None:
    """In an environment that has all packages of this one but torch."""
    packages = tmp_path / "packages"
    packages.mkdir()
    for path in map(Path, dict.fromkeys(site.getsitepackages())):
        for package in path.iterdir():
            if package.suffix != ".pth" and not package.name.startswith(("torch", "functorch", "__editable__")):
                (packages / package.name).symlink_to(package)
    run = str(tmp_path / "run")
    for arguments in (
        ["hermes_jax.train", "--config", "tiny.yaml", f"run_dir={run}", "warm_start.steps=6", "env.total_steps=1"],
        ["hermes_jax.evaluate", str(straight), "env.eval_episodes=2"],
        ["hermes_jax.export", str(straight), "--to", str(tmp_path / "exported")],
    ):
        driver = [sys.executable, "-S", "-c", WITHOUT_TORCH, str(PROJECT), str(packages), *arguments]
        done = subprocess.run(driver, cwd=PROJECT, env=command.env, text=True, capture_output=True, check=False)
        assert (done.returncode, done.stderr) == (0, ""), arguments[0]


def test_the_best_checkpoint_can_be_exported(straight: Path, command: Command, tmp_path: Path) -> None:
    found = metrics(straight)
    success = {step: found["train", step]["eval/success"] for step in (3, 6)}
    best = max(success, key=lambda step: (success[step], step))
    done = command.run("export", straight, "--best", "--to", tmp_path / "best", "--dtype", "bfloat16")
    assert done.out == f"step {best} of {straight} written to {tmp_path / 'best'}\n"
    assert json.loads((tmp_path / "best" / "config.json").read_text())["dtype"] == "bfloat16"


def test_checkpoints_that_are_not_there(straight: Path, command: Command, tmp_path: Path) -> None:
    for start in (["evaluate"], ["export", "--to", tmp_path / "to"]):
        error = command.run(*start, straight / "checkpoints" / "51", status=1).error
        assert f"there is no checkpoint of step 51 in {straight / 'checkpoints'}; there are: 3, 6" in error
    command.run("export", straight / "final", "--to", tmp_path / "copy")
    for path in (straight / "checkpoints" / "3", straight / "final"):
        error = command.run("export", path, "--best", "--to", tmp_path / "to", status=1).error
        assert f"--best chooses among the checkpoints of a run: give its folder, {path} is none" in error
    run = shutil.copytree(straight, tmp_path / "run")
    for manifest in run.glob("checkpoints/*/manifest.json"):
        manifest.write_text(json.dumps(json.loads(manifest.read_text()) | {"metric": None}))
    error = command.run("export", run, "--best", "--to", tmp_path / "to", status=1).error
    assert f"no checkpoint in {run / 'checkpoints'} was ranked by eval/success (checkpoint.best_metric)" in error
    assert "the newest, without --best, is that of step 6" in error
    assert "env.eval_episodes" in error
    assert not (tmp_path / "to").exists()


def test_a_finished_run_is_left_alone(straight: Path, command: Command) -> None:
    def files() -> dict[Path, tuple[int, bytes]]:
        return {p: (p.stat().st_mtime_ns, p.read_bytes()) for p in straight.rglob("*") if p.is_file()}

    before = files()
    done = command.run("train", "--resume", straight)
    assert files() == before
    assert done.out.startswith(f"already finished: {straight} has made all of its 6 steps; to go on, raise env.total")
    printed = (straight.parent / "printed").read_text()
    table = printed[printed.index("4 held-out tasks") :]
    assert f"model: {straight}/final" in table
    assert done.out.partition("\n")[2] == table
    assert not done.err


@pytest.mark.parametrize("gone", ["final", "report.json", "checkpoints/6"])
def test_a_run_that_lacks_its_end_makes_it_again(gone: str, straight: Path, command: Command, tmp_path: Path) -> None:
    run = shutil.copytree(straight, tmp_path / "run")
    shutil.rmtree(run / gone) if (run / gone).is_dir() else (run / gone).unlink()
    done = command.run("train", "--resume", run)
    assert "already finished" not in done.out
    assert f"resumed from the checkpoint of step {3 if gone == 'checkpoints/6' else 6}" in done.out
    assert (run / gone).exists()
    report = [json.loads((folder / "report.json").read_text()) for folder in (straight, run)]
    for one in report:
        del one["after"]["eval/seconds"]
    assert report[0] == report[1]


def test_the_start_of_the_run_is_not_its_end(straight: Path) -> None:
    _, start = load_model(straight / "start")
    _, final = load_model(straight / "final")
    assert np.abs(np.asarray(start["embed"]["embedding"]) - np.asarray(final["embed"]["embedding"])).max() > 0


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["evaluate", "/nowhere"], "/nowhere is no run folder"),
        (["evaluate"], "nothing to evaluate: give PATH, or model.path in the config"),
        (["export", "/nowhere", "--to", "/tmp/x"], "/nowhere is no run folder"),
    ],
)
def test_paths_that_name_nothing(arguments: list[str], message: str, command: Command) -> None:
    assert message in command.run(*arguments, status=1).error
