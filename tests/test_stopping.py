"""What a signal waits for, and what not. Real signals to real processes."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from collections.abc import Iterator

import pytest

from hermes_jax import stopping

PATIENCE_S = 0.5
PROGRAM = """
import asyncio, os, signal, sys, time
from contextlib import nullcontext
from hermes_jax import stopping
stopping.PATIENCE_S = float(sys.argv[3])

async def main():
    stop = stopping.StopSignal(lambda: "last words")
    stop.install()
    with stop.waits_for("the update of step 7") if sys.argv[1] == "worth" else nullcontext():
        print("ready", flush=True)
        await asyncio.to_thread(time.sleep, float(sys.argv[2]))
    try:
        stop.check()
        with stop.waits_for("the checkpoint"):
            await asyncio.to_thread(time.sleep, float(sys.argv[2]))
        stop.check()
    except stopping.Stopped as reason:
        print(f"saved after {reason}", flush=True)
        os._exit(stopping.STATUS)

asyncio.run(main())
"""


@pytest.fixture
def started() -> Iterator[list[subprocess.Popen[str]]]:
    processes: list[subprocess.Popen[str]] = []
    yield processes
    for process in processes:
        process.kill()
        process.communicate()


def stop(started: list[subprocess.Popen[str]], what: str, seconds: float, *signals: int) -> tuple[str, str, float]:
    """Lets a process be busy for so long and sends it signals; its output and how long it took to end."""
    command = [sys.executable, "-c", PROGRAM, what, str(seconds), str(PATIENCE_S)]
    process = subprocess.Popen(command, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    started.append(process)
    assert process.stdout is not None
    assert process.stdout.readline() == "ready\n"
    begun = time.monotonic()
    for number in signals:
        process.send_signal(number)
        time.sleep(0.2)
    out, err = process.communicate(timeout=20)
    assert process.returncode == stopping.STATUS
    return out, err, time.monotonic() - begun


def test_an_update_is_waited_for_and_it_is_said(started: list[subprocess.Popen[str]]) -> None:
    out, err, seconds = stop(started, "worth", 2.5, signal.SIGTERM)
    assert out == "saved after SIGTERM\n"
    assert err == "SIGTERM: waiting for the update of step 7; a second signal ends at once\n"
    assert seconds > 4 * PATIENCE_S


def test_a_short_wait_needs_no_words(started: list[subprocess.Popen[str]]) -> None:
    assert stop(started, "worth", 0.6, signal.SIGINT)[:2] == ("saved after SIGINT\n", "")


def test_a_second_signal_ends_the_wait(started: list[subprocess.Popen[str]]) -> None:
    out, err, seconds = stop(started, "worth", 60, signal.SIGTERM, signal.SIGINT)
    assert (out, err) == ("", "\nSIGTERM: ended at once, as a signal came again; last words\n")
    assert seconds < 3


def test_what_hangs_is_not_waited_for(started: list[subprocess.Popen[str]]) -> None:
    out, err, seconds = stop(started, "hangs", 60, signal.SIGINT)
    how = f"ended by force, as something did not stop within {PATIENCE_S} s"
    assert (out, err) == ("", f"\nSIGINT: {how}; last words\n")
    assert PATIENCE_S <= seconds < 5
