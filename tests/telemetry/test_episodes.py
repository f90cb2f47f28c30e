"""Episodes come back as they were, bit by bit, whatever text they hold."""

from __future__ import annotations

import gzip
import json

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as npst

from hermes_jax.data.trajectory import Episode, Outcome, Trajectory
from hermes_jax.telemetry import EpisodeLog, load_episodes


def trajectory(logprobs=(-0.1, -2.5)) -> Trajectory:
    n = len(logprobs)
    mask = np.array([False] + [True] * n)
    return Trajectory(
        tokens=np.arange(n + 1),
        mask=mask,
        logprobs=np.concatenate([[0], np.asarray(logprobs, np.float32)]),
        temperature=np.where(mask, np.float32(0.7), 1),
        policy_version=np.where(mask, 3, -1),
        turn=np.where(mask, 0, -1),
    )


def episode(**changes) -> Episode:
    values = {
        "task_id": "t1",
        "member": 2,
        "trajectories": (trajectory(), trajectory((-1.0,))),
        "outcome": Outcome.TOOL_TIMEOUT,
        "reward": None,
        "reward_parts": {"exact": 1.0, "style": None},
        "turn_rewards": (0.5,),
        "success": False,
        "messages": ({"role": "user", "content": "hi"}, {"role": "assistant", "tool_calls": [{"id": "1"}]}),
        "timings": {"model": 0.25},
        "counters": {"tool_calls": 2},
        "error": "it hung",
    }
    return Episode(**(values | changes))


def test_an_episode_comes_back(tmp_path):
    path = EpisodeLog(tmp_path / "episodes").write(
        7, [episode(), episode(member=3, reward=0.5)], advantages=[-1.0, 1.0]
    )
    assert path.name == "train_000007.jsonl.gz"
    first, second = load_episodes(tmp_path)
    expected = episode()
    assert (first["step"], first["kind"], first["outcome"], first["reward"]) == (7, "train", "tool_timeout", None)
    assert (first["advantage"], second["advantage"], second["reward"], second["member"]) == (-1.0, 1.0, 0.5, 3)
    for name in ("task_id", "success", "error", "reward_parts", "timings", "counters"):
        assert first[name] == getattr(expected, name), name
    assert first["messages"] == list(expected.messages)
    for saved, original in zip(first["trajectories"], expected.trajectories, strict=True):
        again = Trajectory(**saved)
        for name in saved:
            np.testing.assert_array_equal(getattr(again, name), getattr(original, name), strict=True)


@given(npst.arrays(np.float32, st.integers(1, 20), elements=st.floats(-(2.0**100), 0, width=32)))
def test_log_probs_come_back_bitwise(tmp_path_factory, logprobs):
    folder = tmp_path_factory.mktemp("episodes")
    EpisodeLog(folder).write(0, [episode(trajectories=(trajectory(logprobs),))])
    [row] = load_episodes(folder)
    assert row["trajectories"][0]["logprobs"][1:].tobytes() == logprobs.tobytes()


@given(st.text(st.characters()))
def test_any_text_comes_back(tmp_path_factory, text):
    folder = tmp_path_factory.mktemp("episodes")
    EpisodeLog(folder).write(0, [episode(messages=({"role": "tool", "content": text},), error=text)])
    [row] = load_episodes(folder)
    assert (row["messages"][0]["content"], row["error"]) == (text, text)


def test_lone_surrogates_line_separators_and_odd_objects(tmp_path):
    odd = {"content": "\udcff \u2028 <|im_end|>\r\n", "object": Outcome.ERROR, "path": tmp_path}
    EpisodeLog(tmp_path).write(0, [episode(messages=(odd,))])
    [row] = load_episodes(tmp_path)
    assert row["messages"] == [{"content": odd["content"], "object": "error", "path": str(tmp_path)}]


def test_files_by_step_and_kind_and_the_same_bytes_again(tmp_path):
    log = EpisodeLog(tmp_path)
    for step in (10, 9):
        log.write(step, [episode()], kind="train")
        log.write(step, [episode(member=0)], kind="eval_greedy")
    assert [(row["step"], row["kind"]) for row in load_episodes(tmp_path)] == [
        (9, "eval_greedy"),
        (9, "train"),
        (10, "eval_greedy"),
        (10, "train"),
    ]
    assert [row["step"] for row in load_episodes(tmp_path, kind="train")] == [9, 10]
    assert [row["kind"] for row in load_episodes(tmp_path, step=10)] == ["eval_greedy", "train"]
    before = (tmp_path / "train_000010.jsonl.gz").read_bytes()
    log.write(10, [episode()])
    assert (tmp_path / "train_000010.jsonl.gz").read_bytes() == before
    assert json.loads(gzip.decompress(before))["task_id"] == "t1"


def test_resume_removes_later_steps(tmp_path):
    log = EpisodeLog(tmp_path)
    for step in (1, 2, 3):
        log.write(step, [episode()])
    EpisodeLog(tmp_path, resume_after=2)
    assert [row["step"] for row in load_episodes(tmp_path)] == [1, 2]


def test_an_interrupted_write_leaves_the_old_file(tmp_path):
    log = EpisodeLog(tmp_path)
    log.write(1, [episode()])
    with pytest.raises(AttributeError):
        log.write(1, [episode(), object()])
    assert len(list(load_episodes(tmp_path))) == 1


def test_bad_arguments(tmp_path):
    with pytest.raises(ValueError, match="small letters"):
        EpisodeLog(tmp_path).write(1, [], kind="../x")
    with pytest.raises(FileNotFoundError, match="save_episodes"):
        list(load_episodes(tmp_path / "none"))
