"""A person sees where the run is; a log file gets plain lines."""

from __future__ import annotations

import io

import pytest

from hermes_jax.telemetry import METRICS, Progress
from hermes_jax.telemetry.progress import COLUMNS, duration

STEP = {"train/reward": 0.5, "train/success": 0.25, "update/kl_ref_k3": 0.0123, "speed/generated_tokens_per_s": 7100.4}


class Time:
    def __init__(self):
        self.s = 0.0

    def __call__(self):
        return self.s


def test_plain_lines_where_there_is_no_terminal(monkeypatch):
    monkeypatch.setenv("FORCE_COLOR", "1")
    out, now = io.StringIO(), Time()
    progress = Progress(file=out, now=now)
    progress.start("train", 10)
    for step, seconds in (1, 60), (2, 6):
        now.s += seconds
        progress.update(step, STEP)
    progress.note("not shown")
    progress.print("a warning [with brackets]")
    progress.close()
    assert out.getvalue().splitlines() == [
        "train 1/10  reward 0.500  success 0.250  KL 0.012  tok/s 7,100",
        "train 2/10  reward 0.500  success 0.250  KL 0.012  tok/s 7,100  left 48s",
        "a warning [with brackets]",
    ]


def test_time_left_is_that_of_the_steps_of_late():
    now = Time()
    progress = Progress("none", now=now)
    progress.start("train", 100, step=50)
    assert progress.seconds_left() is None
    now.s = 500  # compiles
    progress.update(52, {})
    assert progress.seconds_left() is None
    now.s += 20
    progress.update(54, {})  # several steps at once, as in a warm start
    assert progress.seconds_left() == 46 * 10
    for step, seconds in (55, 10), (56, 300), (57, 10):  # one of them evaluates
        now.s += seconds
        progress.update(step, {})
    assert progress.seconds_left() == 43 * 10
    for step in range(58, 90):
        now.s += 2
        progress.update(step, {})
    assert progress.seconds_left() == 11 * 2, "the slow ones are long ago"
    now.s += 1000
    progress.start("train", 10)
    assert progress.seconds_left() is None
    progress.update(1, {})
    assert progress.seconds_left() is None


def test_lines_may_be_rarer_but_the_last_one_comes():
    out, now = io.StringIO(), Time()
    progress = Progress("plain", file=out, now=now, every_s=10)
    progress.start("warm start", 20)
    for step in range(1, 21):
        now.s += 1
        progress.update(step, {"warm_start/loss": 1.0})
    assert [line.split()[2] for line in out.getvalue().splitlines()] == ["1/20", "11/20", "20/20"]


def test_live_display_shows_the_same_and_ends_cleanly(monkeypatch):
    class Terminal(io.StringIO):
        def isatty(self):
            return True

    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "120")
    out = Terminal()
    progress = Progress(file=out)
    progress.start("train", 10)
    progress.note("collecting 3 of 64")
    assert "collecting 3 of 64" in out.getvalue()
    progress.update(1, STEP)
    progress.start("train", 20, 1)
    progress.print("hello")
    progress.close()
    progress.close()
    for text in ("reward", "0.250", "7,100", "1/10", "hello"):
        assert text in out.getvalue()


def test_none_is_silent():
    out = io.StringIO()
    progress = Progress("none", file=out)
    progress.start("train", 1)
    progress.update(1, STEP)
    progress.print("x")
    progress.close()
    assert out.getvalue() == ""


def test_columns_are_documented_metrics():
    assert {name for names in COLUMNS.values() for name in names} <= set(METRICS)


@pytest.mark.parametrize(
    ("seconds", "text"), [(0, "0s"), (59.4, "59s"), (59.6, "1m00s"), (125, "2m05s"), (7620, "2h07m")]
)
def test_durations(seconds, text):
    assert duration(seconds) == text
