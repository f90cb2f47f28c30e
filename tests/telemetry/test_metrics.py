"""Names are documented; numbers reach every writer; a resumed run leaves no row of the time that was lost."""

from __future__ import annotations

import json
import math
import subprocess
import sys
import types

import pytest

from hermes_jax.telemetry import (
    METRICS,
    JsonlWriter,
    MetricsLog,
    TensorBoardWriter,
    UnknownMetricError,
    WandbWriter,
    describe,
    of_update,
    read_metrics,
)
from hermes_jax.telemetry.metrics import markdown


def test_every_metric_has_a_meaning_and_stands_in_the_table_for_the_docs():
    for name, metric in METRICS.items():
        assert len(metric.meaning) > 10, name
        assert f"| `{name}` | {metric.unit} | {metric.meaning} |" in markdown()


@pytest.mark.parametrize(
    "name",
    ["loop_lag_s", "train/reward_part/exact-match", "train/outcome/max_turns", "seconds/collect", "update/kl_ref_k3"],
)
def test_names_with_and_without_placeholders(name):
    assert describe(name).meaning


@pytest.mark.parametrize(
    ("name", "near"),
    [
        ("train/rewards", "train/reward?"),
        ("update/clip_fraction", "update/clip_frac"),
        ("train/reward_part/", ""),
        ("train/reward_part/<part>", ""),
        ("xyz", "not documented"),
        ("seconds/a/b", ""),
    ],
)
def test_an_undocumented_name_is_an_error(name, near):
    with pytest.raises(UnknownMetricError) as caught:
        describe(name)
    assert near in str(caught.value)
    assert "telemetry/metrics.py" in str(caught.value)


def test_what_the_engine_counts_is_explained_one_by_one():
    from dataclasses import fields

    from hermes_jax.engines.metrics import EngineMetrics

    ours = {f"engine/{field.name}" for field in fields(EngineMetrics)}
    assert {name for name in METRICS if name.startswith("engine/")} == ours


@pytest.mark.parametrize("kl", [None, "k3"])
def test_every_metric_of_the_real_update_is_documented(kl):
    import jax
    import jax.numpy as jnp

    from hermes_jax.data.packing import PackedBatch
    from hermes_jax.learner.logprobs import ForwardOptions
    from hermes_jax.learner.mesh import make_mesh
    from hermes_jax.learner.optimizer import OptimizerConfig, make_optimizer
    from hermes_jax.learner.state import abstract_state
    from hermes_jax.learner.update import OPTIONAL, make_update_step
    from hermes_jax.models.config import ModelConfig
    from hermes_jax.models.transformer import abstract_params
    from hermes_jax.objectives.correction import Correction
    from hermes_jax.objectives.spec import ObjectiveSpec

    sizes = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2}
    heads = {"model_type": "qwen2", "num_attention_heads": 4, "num_key_value_heads": 2}
    config, mesh = ModelConfig.from_hf(sizes | heads), make_mesh()
    optimizer = make_optimizer(OptimizerConfig(learning_rate=1e-3))
    spec = ObjectiveSpec(kl=kl, beta=0.1 if kl else 0.0, correction=Correction("token_truncate", max=2.0))
    step = make_update_step(config, spec, optimizer, mesh, ForwardOptions(), known=OPTIONAL)
    integers = ("tokens", "segment_ids", "positions", "turn", "policy_version")
    kinds = dict.fromkeys(integers, jnp.int32) | {"loss_mask": jnp.bool_}
    arrays = {name: jax.ShapeDtypeStruct((1, 2, 16), kinds.get(name, jnp.float32)) for name in PackedBatch._fields}
    state = abstract_state(abstract_params(config), optimizer, mesh, config)
    _, metrics = jax.eval_shape(step, state, PackedBatch(**arrays))
    assert metrics
    for name in of_update(metrics):
        describe(name)
    assert set(of_update({"loss": 1, "correction/weight_min": 2})) == {"update/loss", "correction/weight_min"}


def test_rows_are_numbers_with_null_for_what_json_can_not_hold(tmp_path):
    log = MetricsLog([JsonlWriter(tmp_path / "run" / "metrics.jsonl")])
    written = log.log(1, {"train/reward": 1, "update/loss": float("nan"), "train/reward_std": None})
    log.log(1, {"eval/success": 0.5})
    log.log(7, {"warm_start/loss": math.inf}, phase="warm_start")
    assert set(written) == {"train/reward", "update/loss"}
    rows = list(read_metrics(tmp_path / "run" / "metrics.jsonl"))
    assert rows == [
        {"phase": "train", "step": 1, "train/reward": 1.0, "update/loss": None},
        {"phase": "train", "step": 1, "eval/success": 0.5},
        {"phase": "warm_start", "step": 7, "warm_start/loss": None},
    ]
    log.close()
    with pytest.raises(UnknownMetricError):
        MetricsLog([]).log(1, {"loss": 1.0})
    with pytest.raises(ValueError, match="unknown phase"):
        MetricsLog([]).log(1, {}, phase="eval")


def test_rows_survive_a_kill(tmp_path):
    path = tmp_path / "metrics.jsonl"
    code = (
        "import os, signal, sys; from hermes_jax.telemetry import JsonlWriter\n"
        "w = JsonlWriter(sys.argv[1]); w.write('train', 1, {'train/reward': 0.5}); os.kill(os.getpid(), signal.SIGKILL)"
    )
    subprocess.run([sys.executable, "-c", code, str(path)], check=False)
    assert [row["step"] for row in read_metrics(path)] == [1]


def test_resume_removes_later_rows_and_a_cut_off_line(tmp_path):
    path = tmp_path / "metrics.jsonl"
    first = JsonlWriter(path)
    for step in range(1, 4):
        first.write("warm_start", step * 10, {"warm_start/loss": 1.0})
    for step in range(1, 6):
        first.write("train", step, {"train/reward": step / 10})
    first.close()
    with open(path, "a") as file:
        file.write('{"phase": "train", "st')
    again = JsonlWriter(path, resume_after=("train", 3))
    again.write("train", 4, {"train/reward": 9.0})
    again.close()
    rows = [(row["phase"], row["step"]) for row in read_metrics(path)]
    assert rows == [("warm_start", 10), ("warm_start", 20), ("warm_start", 30), *(("train", n) for n in (1, 2, 3, 4))]
    JsonlWriter(path, resume_after=("warm_start", 10)).close()
    assert [(row["phase"], row["step"]) for row in read_metrics(path)] == [("warm_start", 10)]
    assert not list(tmp_path.glob("*.tmp"))


def test_a_damaged_line_in_the_middle_is_named(tmp_path):
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 1}\nnonsense\n{"step": 2}\n')
    with pytest.raises(ValueError, match=r"metrics\.jsonl:2"):
        list(read_metrics(path))


def test_tensorboard_files_hold_the_scalars(tmp_path):
    from tensorboardX.proto.event_pb2 import Event

    log = MetricsLog([TensorBoardWriter(tmp_path)])
    log.log(3, {"train/reward": 0.25})
    log.log(9, {"warm_start/loss": 2.0}, phase="warm_start")
    log.close()
    resumed = MetricsLog([TensorBoardWriter(tmp_path, resume_after=("train", 2))])
    resumed.log(3, {"train/reward": 0.5})
    resumed.close()

    def events(phase):
        for path in sorted((tmp_path / phase).glob("events*")):
            data = path.read_bytes()
            while data:
                size = int.from_bytes(data[:8], "little")
                yield Event.FromString(data[12 : 12 + size])
                data = data[12 + size + 4 :]

    scalars = {
        (phase, value.tag, event.step, value.simple_value)
        for phase in ("train", "warm_start")
        for event in events(phase)
        for value in event.summary.value
    }
    assert scalars == {
        ("train", "train/reward", 3, 0.25),
        ("train", "train/reward", 3, 0.5),
        ("warm_start", "warm_start/loss", 9, 2.0),
    }
    assert any(event.session_log.status == 1 and event.step == 3 for event in events("train")), "old points are hidden"


def test_wandb_is_named_when_it_is_missing(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "wandb", None)
    with pytest.raises(RuntimeError, match=r"hermes-jax\[wandb\]"):
        WandbWriter(project="p", name="n", folder=tmp_path, config={})


def test_wandb_gets_rows_with_their_own_axis(tmp_path, monkeypatch):
    calls = []

    class Run:
        def define_metric(self, *args, **kwargs):
            calls.append(("define", args, kwargs))

        def log(self, row):
            calls.append(("log", json.loads(json.dumps(row))))

        def finish(self):
            calls.append(("finish",))

    stub = types.ModuleType("wandb")
    stub.init = lambda **kwargs: calls.append(("init", kwargs)) or Run()
    monkeypatch.setitem(sys.modules, "wandb", stub)
    log = MetricsLog([WandbWriter(project="p", name="runs/a", folder=tmp_path, config={"seed": 1})])
    log.log(2, {"train/reward": 1.0})
    log.log(5, {"warm_start/loss": 2.0}, phase="warm_start")
    log.close()
    assert calls[0][1] | {"dir": ""} == {
        "project": "p",
        "name": "runs/a",
        "id": "runs-a",
        "dir": "",
        "config": {"seed": 1},
        "resume": "allow",
    }
    assert ("log", {"train/reward": 1.0, "train_step": 2}) in calls
    assert ("log", {"warm_start/loss": 2.0, "warm_start_step": 5}) in calls
    assert calls[-1] == ("finish",)


def test_one_writer_that_fails_to_close_does_not_keep_the_others_open(tmp_path):
    class Broken:
        def write(self, phase, step, values):
            pass

        def close(self):
            raise OSError("no space")

    writer = JsonlWriter(tmp_path / "m.jsonl")
    with pytest.raises(OSError, match="no space"):
        MetricsLog([Broken(), writer]).close()
    assert writer._file.closed


def test_telemetry_without_jax():
    code = "import sys, hermes_jax.telemetry, hermes_jax.telemetry.lag; assert 'jax' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)
