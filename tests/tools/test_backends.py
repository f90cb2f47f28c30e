"""A backend that does not work is an error with one command to run, never another backend."""

from __future__ import annotations

import os
import stat
import subprocess
import sys
from functools import partial
from pathlib import Path

import pytest

from hermes_jax.tools.backends import BackendUnavailable, SandboxSettings, check_backend, local_launch
from tests.tools.processes import open_files


def fake_bwrap(folder: Path, script: str) -> None:
    file = folder / "bwrap"
    file.write_text("#!/bin/sh\n" + script)
    file.chmod(file.stat().st_mode | stat.S_IXUSR)


@pytest.mark.parametrize("backend", ["bubblewrap", "local"])
def test_what_works_passes_and_leaves_nothing(backend: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    before = open_files(os.getpid())
    check_backend(backend)
    assert open_files(os.getpid()) == before
    assert list(tmp_path.iterdir()) == []


def test_missing_bubblewrap_names_the_command_and_the_choice(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(BackendUnavailable, match="apt-get install -y bubblewrap") as error:
        check_backend("bubblewrap")
    assert "terminal_backend: local" in str(error.value)


def test_a_bubblewrap_that_fails_shows_what_it_printed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    fake_bwrap(tmp_path, "echo 'bwrap: No permissions to create new namespace' >&2; exit 1")
    with pytest.raises(BackendUnavailable, match="No permissions to create new namespace") as error:
        check_backend("bubblewrap")
    assert "Run: " in str(error.value)


def test_an_old_bubblewrap_is_told_apart(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    fake_bwrap(tmp_path, "echo 'bwrap: Unknown option --disable-userns' >&2; exit 1")
    with pytest.raises(BackendUnavailable, match=r"0\.8 or newer"):
        check_backend("bubblewrap")


def test_a_bubblewrap_that_hangs_is_given_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    monkeypatch.setattr("hermes_jax.tools.backends.SandboxSettings", partial(SandboxSettings, start_timeout_s=0.5))
    fake_bwrap(tmp_path, "exec sleep 60")
    with pytest.raises(BackendUnavailable, match="no message"):
        check_backend("bubblewrap")


def test_an_unknown_backend_names_the_known_ones() -> None:
    with pytest.raises(ValueError, match="bubblewrap, local"):
        check_backend("docker")


def test_the_local_workspace_is_removed_whatever_lies_in_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "temporary"))
    (tmp_path / "temporary").mkdir()
    (tmp_path / "kept").mkdir()
    (tmp_path / "kept" / "file").write_text("x")
    launch = local_launch(SandboxSettings(backend="local"))
    place = Path(launch.workspace or "")
    (place / "a" / "b").mkdir(parents=True)
    (place / "a" / "b" / "c").write_text("x")
    (place / "link").symlink_to(tmp_path / "kept")
    (place / "a" / "b").chmod(0)
    (place / "a").chmod(0)
    for fd in launch.pass_fds:
        os.close(fd)
    launch.remove_workspace()
    launch.remove_workspace()
    assert list((tmp_path / "temporary").iterdir()) == []
    assert (tmp_path / "kept" / "file").read_text() == "x"


def test_a_very_deep_workspace_is_removed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    launch = local_launch(SandboxSettings(backend="local"))
    for fd in launch.pass_fds:
        os.close(fd)
    script = "import os; [(os.mkdir('d'), os.chdir('d')) for _ in range(1500)]; os.chmod('.', 0)"
    subprocess.run([sys.executable, "-c", script], cwd=launch.workspace, check=True)
    launch.remove_workspace()
    assert list(tmp_path.iterdir()) == []
