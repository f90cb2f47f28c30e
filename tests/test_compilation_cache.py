"""Compiled programs are kept for the next start, and a bad folder for them harms nobody."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from hermes_jax.compilation_cache import _make_room

REPOSITORY = Path(__file__).parents[1]
PROGRAM = """
import sys
from hermes_jax.compilation_cache import keep_compilations
import jax, jax.numpy as jnp
found = []
jax.monitoring.register_event_listener(lambda event, **_: found.append(event))
place = keep_compilations(None if sys.argv[1] == "null" else sys.argv[1])
compute = jax.jit(lambda x: jnp.tanh(x @ x.T).sum(axis=0))
value = compute(jnp.linspace(-1, 1, 64).reshape(8, 8))
hits = sum(event == "/jax/compilation_cache/cache_hits" for event in found)
print(place, hits, bytes(memoryview(value)).hex())
"""


def start(folder: Path | str, **env: str) -> subprocess.Popen[str]:
    clean = {k: v for k, v in os.environ.items() if k not in ("JAX_COMPILATION_CACHE_DIR", "XDG_CACHE_HOME")}
    return subprocess.Popen(
        [sys.executable, "-c", PROGRAM, str(folder)],
        env={**clean, "PYTHONPATH": str(REPOSITORY), "JAX_PLATFORMS": "cpu", **env},
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )


def end(process: subprocess.Popen[str]) -> tuple[str, int, str, str]:
    """Place of the programs, those found there, the result, and what was said on stderr."""
    out, err = process.communicate(timeout=120)
    assert process.returncode == 0, err
    place, hits, value = out.split()
    return place, int(hits), value, err


def run(folder: Path | str, **env: str) -> tuple[str, int, str, str]:
    return end(start(folder, **env))


def test_the_second_start_finds_the_programs_and_gives_the_same_bits(tmp_path: Path) -> None:
    place, hits, value, said = run(tmp_path)
    again = run(tmp_path)
    assert hits == 0
    assert again[1] > 0
    assert again[2] == value == run("off")[2]
    assert said == again[3] == ""
    assert Path(place).parent == tmp_path
    assert Path(place).stat().st_mode & 0o077 == 0, "nobody else may put machine code there"


def test_two_processes_at_once(tmp_path: Path) -> None:
    both = [start(tmp_path), start(tmp_path)]
    values = {end(process)[2] for process in both}
    _, hits, value, said = run(tmp_path)
    assert {value} == values
    assert hits > 0
    assert said == ""


@pytest.mark.parametrize("damage", ["cut", "flipped"])
def test_a_damaged_program_is_said_compiled_anew_and_replaced(damage: str, tmp_path: Path) -> None:
    place, _, value, _ = run(tmp_path)
    files = list(Path(place).glob("*-cache"))
    for file in files:
        data = bytearray(file.read_bytes())
        data[len(data) // 2] ^= 0xFF
        file.write_bytes(bytes(data[: len(data) // 2]) if damage == "cut" else bytes(data))
    _, hits, mended, said = run(tmp_path)
    assert mended == value
    assert hits == 0
    assert said.startswith("warning: Error reading persistent compilation cache entry")
    assert "removed the broken file" in said
    assert "Traceback" not in said
    _, hits, again, said = run(tmp_path)
    assert (again, said) == (value, "")
    assert hits > 0


def test_a_folder_that_cannot_be_made_is_said_and_ends_nothing(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    place, hits, value, said = run(tmp_path / "file" / "cache")
    assert (place, hits) == ("None", 0)
    assert value == run("off")[2]
    [line] = said.splitlines()
    assert line.startswith(f"warning: compiled programs can't be kept in {tmp_path}/file/cache")
    assert "set compilation_cache to another folder, or to off" in line


def test_a_folder_that_is_full_is_said_and_ends_nothing(tmp_path: Path) -> None:
    """A limit on the size of files stands for a full disk."""
    limited = PROGRAM.replace(
        "import jax,",
        "import resource, signal; signal.signal(signal.SIGXFSZ, signal.SIG_IGN)\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (64, 64))\nimport jax,",
    )
    env = {**os.environ, "PYTHONPATH": str(REPOSITORY), "JAX_PLATFORMS": "cpu"}
    done = subprocess.run(
        [sys.executable, "-c", limited, str(tmp_path)], env=env, capture_output=True, text=True, check=True
    )
    assert done.stderr.startswith("warning: Error writing persistent compilation cache entry")
    assert run("off")[2] in done.stdout


def test_where_the_programs_are(tmp_path: Path) -> None:
    assert run("null", XDG_CACHE_HOME=str(tmp_path))[0].startswith(f"{tmp_path}/hermes-jax/compiled/")
    assert run("null", HOME=str(tmp_path))[0].startswith(f"{tmp_path}/.cache/hermes-jax/compiled/")
    assert run("null", JAX_COMPILATION_CACHE_DIR=str(tmp_path / "mine"))[0] == str(tmp_path / "mine")
    assert run("off", XDG_CACHE_HOME=str(tmp_path / "unused"))[0] == "None"
    assert not (tmp_path / "unused").exists()


def test_the_oldest_programs_leave_a_full_folder(tmp_path: Path) -> None:
    for age, name in enumerate("abcd"):
        (tmp_path / name).write_bytes(bytes(100))
        os.utime(tmp_path / name, (1000 - age, 1000 - age))
    _make_room(tmp_path, 250)
    assert sorted(file.name for file in tmp_path.iterdir()) == ["a", "b"]


def test_importing_the_library_changes_no_setting_of_jax() -> None:
    """In a process of its own: commands that other tests run in this one do change it."""
    code = "import hermes_jax.trainer, hermes_jax.compilation_cache, jax; print(jax.config.jax_compilation_cache_dir)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == [str(os.environ.get("JAX_COMPILATION_CACHE_DIR"))]
