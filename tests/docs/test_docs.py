"""Every command and every snippet of the documentation runs, in a copy of the tree."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest

from hermes_jax.config import load

ROOT = Path(__file__).resolve().parents[2]
PAGES = sorted([ROOT / "README.md", *ROOT.glob("docs/*.md")])
BLOCK = re.compile(r"^```(\w+)\n(.*?)^```", re.DOTALL | re.MULTILINE)
THIS_COMMAND = "bash scripts/test.sh"  # what runs this very test
QUICKSTART = "bash scripts/quickstart.sh"  # has a test of its own


def _blocks(page: Path, language: str) -> list[str]:
    return [text for found, text in BLOCK.findall(page.read_text()) if found == language]


def _commands(page: Path) -> list[str]:
    lines = [line for block in _blocks(page, "bash") for line in block.splitlines()]
    commands = [line.split("  #")[0].strip() for line in lines if line.strip() and not line.startswith("#")]
    return [command for command in commands if command not in (THIS_COMMAND, QUICKSTART)]


@pytest.fixture(scope="module")
def tree(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tracked files, with the environments and models of the real tree."""
    copy = tmp_path_factory.mktemp("tree")
    files = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, check=True, text=True).stdout
    for name in filter(None, files.split("\0")):
        if (ROOT / name).is_file():
            (copy / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, copy / name)
    # The test environment has all that the trainer's own has; .venv itself is made by the quickstart test.
    (copy / ".venv").symlink_to(ROOT / ".venv-test")
    (copy / ".venv-test").symlink_to(ROOT / ".venv-test")
    (copy / "models").symlink_to(ROOT / "models")
    return copy


@pytest.mark.parametrize("page", [p for p in PAGES if _commands(p)], ids=lambda p: p.name)
def test_commands_run(page: Path, tree: Path) -> None:
    for command in _commands(page):
        done = subprocess.run(
            ["bash", "-euo", "pipefail", "-c", command],
            cwd=tree,
            env={**os.environ, "JAX_PLATFORMS": "cpu"},
            capture_output=True,
            text=True,
            timeout=1500,
        )
        assert done.returncode == 0, f"{page.name}: {command}\n{done.stdout[-3000:]}\n{done.stderr[-3000:]}"


@pytest.mark.parametrize("page", [p for p in PAGES if _blocks(p, "python")], ids=lambda p: p.name)
def test_snippets_run(page: Path, tree: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """After the page's commands, which make the runs that snippets look at."""
    monkeypatch.chdir(tree)
    for number, snippet in enumerate(_blocks(page, "python")):
        exec(compile(snippet, f"{page.name}, snippet {number}", "exec"), {"__name__": f"snippet_{number}"})


@pytest.mark.parametrize("page", [p for p in PAGES if _blocks(p, "yaml")], ids=lambda p: p.name)
def test_configs_load(page: Path, tmp_path: Path) -> None:
    for number, text in enumerate(_blocks(page, "yaml")):
        file = tmp_path / f"{number}.yaml"
        file.write_text(text)
        load(file)


@pytest.mark.parametrize("page", PAGES, ids=lambda p: p.name)
def test_links_and_pictures_exist(page: Path) -> None:
    for target in re.findall(r"\]\(([^)#]+)", page.read_text()):
        if "://" not in target:
            assert (page.parent / target).exists(), f"{page.name} points to {target}"


def test_every_loss_is_documented() -> None:
    from hermes_jax.config.presets import PRESETS
    from hermes_jax.objectives import AGGREGATIONS, OBJECTIVES
    from hermes_jax.objectives.user_loss import ARRAYS

    page = (ROOT / "docs" / "losses.md").read_text()
    rows = {line.split("|")[1].strip() for line in page.splitlines() if line.startswith("| `")}
    assert {f"`{name}`" for name in (*PRESETS, *OBJECTIVES, *AGGREGATIONS)} <= rows
    for name in ARRAYS:
        assert f"`{name}`" in page


def test_every_metric_is_documented() -> None:
    from hermes_jax.telemetry.metrics import markdown

    page = (ROOT / "docs" / "metrics.md").read_text()
    assert markdown() in page, "docs/metrics.md is out of date: run `python scripts/write_metrics_page.py`"
