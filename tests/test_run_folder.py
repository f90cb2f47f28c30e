"""One process per run folder; nothing is removed while another one trains in it."""

import subprocess
import sys
from pathlib import Path

import pytest

from hermes_jax.config import build, dump
from hermes_jax.run_folder import RunFolderError, open_run_folder

CONFIG = dump(build({"run_dir": "x"}))
OTHER = (
    "import sys; from pathlib import Path; from hermes_jax.run_folder import RunFolder; "
    "RunFolder(Path(sys.argv[1])).begin(open(sys.argv[2]).read(), resume=sys.argv[3] == 'resume'); print('taken')"
)


def _other_process(root: Path, how: str) -> subprocess.CompletedProcess[str]:
    config = root.parent / "config.yaml"
    config.write_text(CONFIG)
    return subprocess.run([sys.executable, "-c", OTHER, root, config, how], capture_output=True, text=True, check=False)


@pytest.mark.parametrize("how", ["resume", "overwrite"])
def test_a_folder_in_use_is_taken_by_nobody_else(tmp_path: Path, how: str) -> None:
    folder = open_run_folder(tmp_path / "run", resume=False, overwrite=False)
    folder.begin(CONFIG, resume=False)
    (folder.root / "metrics.jsonl").write_text("kept")
    refused = _other_process(folder.root, how)
    assert refused.returncode != 0
    assert "another process is training in" in refused.stderr
    assert (folder.root / "metrics.jsonl").read_text() == "kept"
    folder.release()
    assert _other_process(folder.root, how).stdout == "taken\n"


def test_overwriting_removes_the_old_run_but_not_the_lock(tmp_path: Path) -> None:
    first = open_run_folder(tmp_path / "run", resume=False, overwrite=False)
    first.begin(CONFIG, resume=False)
    (first.root / "episodes").mkdir()
    first.release()
    with pytest.raises(RunFolderError, match="already holds a run"):
        open_run_folder(tmp_path / "run", resume=False, overwrite=False)
    second = open_run_folder(tmp_path / "run", resume=False, overwrite=True)
    second.begin(CONFIG, resume=False)
    assert sorted(path.name for path in second.root.iterdir()) == [".lock", "config.yaml"]
    second.release()


def test_a_folder_with_something_else_in_it_is_refused(tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "thesis.tex").write_text("mine")
    with pytest.raises(RunFolderError, match="not empty and holds no run"):
        open_run_folder(tmp_path / "run", resume=False, overwrite=True)
