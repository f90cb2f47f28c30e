"""The SmolLM2 script around the download: a complete folder is left alone, a foreign one is never touched."""

from __future__ import annotations

import runpy
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / "scripts" / "get_smollm2.py"


def run(to: Path) -> subprocess.CompletedProcess:
    return subprocess.run([sys.executable, SCRIPT, "--to", to], capture_output=True, text=True, check=False, timeout=60)


TWO_AT_ONCE = """
import importlib.util, os, sys, time
from pathlib import Path
spec = importlib.util.spec_from_file_location("get_smollm2", sys.argv[1])
script = importlib.util.module_from_spec(spec)
spec.loader.exec_module(script)
others, mine = sys.argv[2].split(","), sys.argv[3]

def convert(gguf, to):  # in place of the download: both are at work before either has finished
    to.mkdir()
    for name in script.FILES:
        (to / name).write_text(mine)
    Path(mine).touch()
    while not all(Path(other).exists() for other in others):
        time.sleep(0.01)

script.fetch, script.convert = (lambda scratch: scratch), convert
sys.argv = ["get_smollm2", "--to", sys.argv[4]]
sys.exit(script.main())
"""


@pytest.mark.parametrize("before", ["nothing", "empty folder"])
def test_two_at_once_both_succeed(tmp_path, before):
    to, marks = tmp_path / "models" / "smollm2", [str(tmp_path / "one"), str(tmp_path / "two")]
    if before == "empty folder":
        to.mkdir(parents=True)
    command = [sys.executable, "-c", TWO_AT_ONCE, SCRIPT, ",".join(marks)]
    both = [subprocess.Popen([*command, mark, to], stdout=subprocess.PIPE, stderr=subprocess.PIPE) for mark in marks]
    for process in both:
        out, err = process.communicate(timeout=60)
        assert process.returncode == 0, err
        assert b"SmolLM2-135M-Instruct is in" in out
    texts = {path.read_text() for path in to.iterdir()}
    assert len(texts) == 1, "all files are of one of them"
    assert texts < set(marks)
    assert [path.name for path in to.parent.iterdir()] == ["smollm2"], "nothing else is left"


def test_a_folder_that_somebody_else_fills_meanwhile_is_not_touched(tmp_path):
    to, made = tmp_path / "to", tmp_path / "made"
    for folder, text in (to, "mine"), (made, "new"):
        folder.mkdir()
        (folder / "config.json").write_text(text)
    with pytest.raises(OSError, match="not empty"):
        runpy.run_path(str(SCRIPT))["put"](made, to)
    assert (to / "config.json").read_text() == "mine"


def test_a_complete_folder_is_left_alone(smollm2):
    before = {path: path.stat().st_mtime_ns for path in smollm2.iterdir()}
    done = run(smollm2)
    assert (done.returncode, "nothing to do" in done.stdout) == (0, True)
    assert {path: path.stat().st_mtime_ns for path in smollm2.iterdir()} == before


def test_a_folder_with_other_things_is_refused(tmp_path):
    (tmp_path / "notes.txt").write_text("mine")
    done = run(tmp_path)
    assert done.returncode == 1
    assert "remove it or choose another" in done.stderr
    assert (tmp_path / "notes.txt").read_text() == "mine"
