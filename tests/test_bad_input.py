"""What a person can get wrong before a run begins: one clear message, no traceback, nothing written, nothing lost."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from envs.terminal_test.policy import build
from hermes_jax.train import main

WEIGHTS = "model.safetensors"


@pytest.fixture(scope="session")
def good_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small model folder without fault."""
    folder = tmp_path_factory.mktemp("good") / "model"
    build(folder, 0)
    return folder


@pytest.fixture
def model(good_model: Path, tmp_path: Path) -> Path:
    """A copy of it, to be damaged."""
    return Path(shutil.copytree(good_model, tmp_path / "model"))


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A run folder that does not exist yet."""
    return tmp_path / "run"


@pytest.fixture
def refused(capsys: pytest.CaptureFixture[str], run: Path) -> Callable[..., str]:
    """Trains with these arguments, which must be refused; returns the message. No run folder may appear."""

    def refuse(*arguments: str | Path, status: int = 1) -> str:
        before = sorted(run.rglob("*")) if run.exists() else None
        small = ["env.max_token_length=32", "model.context_length=256", "env.enabled_toolsets=[terminal]"]
        given = [*small, f"run_dir={run}", *map(str, arguments)]
        assert main(["--config", "envs/terminal_test/default.yaml", *given]) == status
        printed = capsys.readouterr()
        assert printed.err.startswith("error: "), printed
        assert printed.err.count("error: ") == 1
        assert "Traceback" not in printed.err
        assert (sorted(run.rglob("*")) if run.exists() else None) == before, "nothing is written"
        return printed.err

    return refuse


@pytest.fixture(autouse=True)
def _in_the_repository(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(Path(__file__).parents[1])


# -- the model folder --------------------------------------------------------------------------------------------------


def test_no_model(refused: Callable[..., str]) -> None:
    assert "no model: set model.path to an HF model folder" in refused()


def test_the_folder_is_missing(refused: Callable[..., str], tmp_path: Path) -> None:
    message = refused(f"model.path={tmp_path / 'elsewhere'}")
    assert f"no model folder {tmp_path / 'elsewhere'}: download the model there, or correct the path" in message


@pytest.mark.parametrize("file", ["config.json", "tokenizer.json", WEIGHTS])
def test_a_file_is_missing(file: str, refused: Callable[..., str], model: Path) -> None:
    (model / file).unlink()
    message = refused(f"model.path={model}")
    assert str(model) in message
    assert file in message


@pytest.mark.parametrize("file", ["config.json", "tokenizer.json", WEIGHTS])
def test_a_file_is_half_written(file: str, refused: Callable[..., str], model: Path) -> None:
    whole = (model / file).read_bytes()
    (model / file).write_bytes(whole[: len(whole) // 2])
    message = refused(f"model.path={model}")
    assert str(model) in message
    assert "again" in message, "it says what to do"


def test_a_shard_is_missing(refused: Callable[..., str], model: Path) -> None:
    tensors = load_file(model / WEIGHTS)
    names = sorted(tensors)
    (model / WEIGHTS).unlink()
    shards = {"model-00001-of-00002.safetensors": names[:5], "model-00002-of-00002.safetensors": names[5:]}
    for shard, held in shards.items():
        save_file({name: tensors[name] for name in held}, model / shard)
    index = {"metadata": {}, "weight_map": {name: shard for shard, held in shards.items() for name in held}}
    (model / f"{WEIGHTS}.index.json").write_text(json.dumps(index))
    (model / "model-00002-of-00002.safetensors").unlink()
    message = refused(f"model.path={model}")
    assert f"{model}/model-00002-of-00002.safetensors is missing" in message
    assert "copy that file" in message


def test_a_tensor_has_the_wrong_shape(refused: Callable[..., str], model: Path) -> None:
    tensors = load_file(model / WEIGHTS)
    tensors["model.norm.weight"] = np.ones(7, np.float32)
    save_file(tensors, model / WEIGHTS)
    message = refused(f"model.path={model}")
    assert "tensor model.norm.weight has shape [7], config.json asks for [128]" in message


def test_a_tensor_is_missing(refused: Callable[..., str], model: Path) -> None:
    tensors = load_file(model / WEIGHTS)
    del tensors["model.norm.weight"]
    save_file(tensors, model / WEIGHTS)
    assert "lacks tensor model.norm.weight" in refused(f"model.path={model}")


def test_another_kind_of_model(refused: Callable[..., str], model: Path) -> None:
    change_json(model / "config.json", model_type="bert")
    message = refused(f"model.path={model}")
    assert "bert" in message
    assert "qwen3" in message, "it says which kinds there are"


def test_a_senseless_config_json(refused: Callable[..., str], model: Path) -> None:
    change_json(model / "config.json", hidden_size=None)
    assert f"{model}: config.json: hidden_size missing or no positive integer" in refused(f"model.path={model}")


def test_a_context_longer_than_the_model_s(refused: Callable[..., str], model: Path) -> None:
    message = refused(f"model.path={model}", "model.context_length=1024")
    assert "model.context_length is 1024" in message
    assert "512 positions" in message


def change_json(file: Path, **changes: object) -> None:
    content = {**json.loads(file.read_text()), **changes}
    file.write_text(json.dumps({key: value for key, value in content.items() if value is not None}))


# -- chat template and prompt ------------------------------------------------------------------------------------------

IGNORES_TOOLS = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def test_no_chat_template(refused: Callable[..., str], model: Path) -> None:
    (model / "chat_template.jinja").unlink()
    message = refused(f"model.path={model}")
    assert "chat template" in message
    assert "chat_template.jinja" in message, "it says where to put one"


def test_a_template_that_is_no_jinja(refused: Callable[..., str], model: Path) -> None:
    (model / "chat_template.jinja").write_text("{% for message in messages %}")
    assert "chat template" in refused(f"model.path={model}")


def test_a_template_that_ignores_tools(refused: Callable[..., str], model: Path) -> None:
    (model / "chat_template.jinja").write_text(IGNORES_TOOLS)
    message = refused(f"model.path={model}", "env.system_prompt=Be exact.")
    assert "the policy can't see the tools terminal" in message
    assert "{tools}" in message


def test_the_system_prompt_may_show_the_tools_instead(refused: Callable[..., str], model: Path) -> None:
    """Then something else is found wrong, here the length of the prompt."""
    (model / "chat_template.jinja").write_text(IGNORES_TOOLS)
    assert "a prompt has" in refused(f"model.path={model}", "env.system_prompt=Tools: {tools}")


def test_a_prompt_longer_than_the_context(refused: Callable[..., str], model: Path) -> None:
    message = refused(f"model.path={model}", f"env.system_prompt={'word ' * 200}")
    assert "tokens, the context holds 256 with the reply; raise model.context_length" in message


# -- names and the config ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("override", "words"),
    [
        ("env.name=terminal_tests", ["env.name", "terminal_tests", "terminal_test"]),
        ("env.enabled_toolsets=[terminel]", ["env.enabled_toolsets", "'terminel'", "did you mean 'terminal'?"]),
        ("env.tool_call_parser=hermess", ["env.tool_call_parser", "'hermess'", "hermes"]),
        ("env.options.colour=red", ["env.options", "colour", "eval_items"]),
    ],
)
def test_unknown_names(override: str, words: list[str], refused: Callable[..., str], model: Path) -> None:
    message = refused(f"model.path={model}", override)
    for word in words:
        assert word in message


@pytest.mark.parametrize(
    ("override", "words"),
    [
        ("env.group_sise=8", ["env.group_sise", "did you mean `env.group_size`?"]),
        ("grpo.temperature=warm", ["grpo.temperature", "a number", "'warm'"]),
        ("env.group_size=1", ["env.group_size is 1", "set env.group_size to 2 or more"]),
        ("env.group_size", ["`env.group_size` has no value", "env.group_size=8"]),
        ("grpo.head_chunk=0", ["grpo.head_chunk", "got 0"]),
        ("openai.slots=3", ["openai.slots", ">= 4", "got 3"]),
        ("openai.server_type=vllm", ["openai.server_type: vllm", "not part of this version"]),
        ("warm_start.learning_rate=0.1", ["warm_start.learning_rate", "warm_start.steps is 0"]),
    ],
)
def test_wrong_keys_and_values(override: str, words: list[str], refused: Callable[..., str], model: Path) -> None:
    message = refused(f"model.path={model}", override, status=2)
    for word in words:
        assert word in message


def test_a_builder_that_is_none(refused: Callable[..., str]) -> None:
    message = refused("model.builder=envs.terminal_test.policy:make")
    assert "model.builder: 'envs.terminal_test.policy:make' is no 'module:function'" in message


@pytest.mark.parametrize(
    ("override", "words"),
    [
        ("mesh.fsdp=64", ["mesh: ", "needs 64 devices"]),
        ("mesh.tensor=3", ["mesh: ", "3"]),
    ],
)
def test_a_mesh_that_there_is_not(override: str, words: list[str], refused: Callable[..., str], model: Path) -> None:
    message = refused(f"model.path={model}", "learner.micro_tokens=131072", override)
    for word in words:
        assert word in message


def test_no_config(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([]) == 2
    assert "give a config: --config FILE, or --resume RUN" in capsys.readouterr().err


def test_a_config_file_that_is_missing(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--config", "nowhere.yaml"]) == 2
    assert "nowhere.yaml" in capsys.readouterr().err


# -- the machine -------------------------------------------------------------------------------------------------------


@pytest.fixture
def _no_bubblewrap(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A PATH that holds every command but one."""
    commands = tmp_path / "bin"
    commands.mkdir()
    for folder in os.environ["PATH"].split(os.pathsep):
        for file in Path(folder).iterdir() if Path(folder).is_dir() else ():
            if file.name != "bwrap" and not (commands / file.name).exists():
                (commands / file.name).symlink_to(file)
    monkeypatch.setenv("PATH", str(commands))


@pytest.mark.usefixtures("_no_bubblewrap")
def test_bubblewrap_is_missing(refused: Callable[..., str], model: Path) -> None:
    message = refused(f"model.path={model}")
    assert "bubblewrap is not installed" in message
    assert "apt-get install -y bubblewrap" in message
    assert "`terminal_backend: local`" in message


@pytest.mark.usefixtures("_no_bubblewrap")
def test_no_sandbox_must_be_written(refused: Callable[..., str], model: Path) -> None:
    """Then the next thing is found wrong."""
    assert "a prompt has" in refused(
        f"model.path={model}", "env.terminal_backend=local", f"env.system_prompt={'word ' * 200}"
    )


# -- the run folder ----------------------------------------------------------------------------------------------------


@pytest.fixture
def used(run: Path) -> Path:
    """A folder with a run in it."""
    run.mkdir()
    (run / "config.yaml").write_text("# Resolved configuration of a test\nseed: 3\n")
    (run / "metrics.jsonl").write_text("{}\n")
    return run


def test_a_second_run_in_the_same_folder(refused: Callable[..., str], model: Path, used: Path) -> None:
    message = refused(f"model.path={model}", status=2)
    assert f"{used} already holds a run; go on with it by --resume, replace it by --overwrite" in message


def test_resume_and_overwrite(refused: Callable[..., str], used: Path) -> None:
    assert "contradict each other" in refused("--resume", "--overwrite", status=2)


def test_nothing_to_resume(refused: Callable[..., str], run: Path) -> None:
    assert f"nothing to resume: {run} holds no run" in refused("--resume", status=2)
    assert f"nothing to resume: {run} holds no run" in refused("--resume", run, status=2)


def test_a_folder_with_other_things(refused: Callable[..., str], run: Path) -> None:
    """Not even `--overwrite` touches them."""
    run.mkdir()
    (run / "config.yaml").write_text("mine: true\n")
    for flags in ((), ("--overwrite",)):
        assert f"{run} is not empty and holds no run" in refused(*flags, status=2)


def test_a_run_folder_that_is_a_file(refused: Callable[..., str], run: Path) -> None:
    run.write_text("mine")
    assert f"{run} is a file" in refused(status=2)
    assert run.read_text() == "mine"


def test_overwrite_keeps_the_old_run_while_anything_is_wrong(refused: Callable[..., str], used: Path) -> None:
    refused("--overwrite", "model.path=/nowhere")
    assert (used / "metrics.jsonl").exists()


def test_resume_with_another_config(refused: Callable[..., str], used: Path) -> None:
    message = refused("--resume", "env.group_size=6", "grpo.temperature=0.9", status=2)
    assert f"a run can't be resumed with other options of what it trains (first value: {used}/config.yaml)" in message
    for line in ("seed: 3 -> 0", "env.group_size: 4 -> 6", "grpo.temperature: 0.7 -> 0.9"):
        assert f"\n  {line}\n" in message
    assert "env.total_steps" not in message
    assert "export" in message, "it says what to do instead"


def test_more_steps_of_a_falling_learning_rate(refused: Callable[..., str], used: Path) -> None:
    (used / "config.yaml").write_text("# Resolved configuration of a test\noptimizer:\n  schedule: cosine\n")
    message = refused("--resume", used, "env.total_steps=5", "optimizer.schedule=cosine", status=2)
    assert "\n  env.total_steps: 1000 -> 5\n" in message
