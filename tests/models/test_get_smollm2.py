"""The SmolLM2 script around the download: a complete folder is left alone, a foreign one is never touched."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

SCRIPT = Path(__file__).parents[2] / "scripts" / "get_smollm2.py"


def run(to: Path) -> subprocess.CompletedProcess:
    return subprocess.run([sys.executable, SCRIPT, "--to", to], capture_output=True, text=True, check=False, timeout=60)


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
