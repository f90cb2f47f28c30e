"""A module imports from its own folder and from lower floors."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = ROOT / "hermes_jax"

FLOORS = {
    **dict.fromkeys(("objectives", "config", "clock", "telemetry", "run_folder", "stopping"), 0),
    **dict.fromkeys(("host_memory", "compilation_cache"), 0),
    **dict.fromkeys(("models", "data"), 1),
    **dict.fromkeys(("engines", "tools"), 2),
    **dict.fromkeys(("rollout", "learner"), 3),
    **dict.fromkeys(("train", "evaluate", "export", "compare_losses"), 5),
}  # all other modules of the package itself are on floor 4
FORBIDDEN = {
    "objectives": {"flax", "orbax", "optax", "transformers", "pydantic"},
    "data": {"flax", "jax"},
    "tools": {"jax", "flax"},
    "rollout": {"jax", "flax", "optax"},
    "config": {"jax"},
}


def _place(path: Path) -> str:
    relative = path.relative_to(PACKAGE)
    return relative.parts[0].removesuffix(".py")


def _imports(path: Path) -> set[str]:
    found: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            found.add(node.module)
            found.update(f"{node.module}.{alias.name}" for alias in node.names if node.module == "hermes_jax")
    return found


@pytest.mark.parametrize("path", sorted(PACKAGE.rglob("*.py")), ids=lambda p: str(p.relative_to(PACKAGE)))
def test_imports_stay_on_their_floor(path: Path) -> None:
    place = _place(path)
    if place == "__init__":
        return
    floor = FLOORS.get(place, 4)
    for name in _imports(path):
        top, _, rest = name.partition(".")
        assert top not in FORBIDDEN.get(place, set()), f"{path} imports {name}"
        if top != "hermes_jax" or not rest:
            continue
        other = rest.split(".")[0]
        other_floor = FLOORS.get(other, 4)
        assert other == place or other_floor < floor or (other_floor == floor == 4), f"{path} imports {name}"


def test_the_floors_name_what_exists() -> None:
    places = {_place(path) for path in PACKAGE.rglob("*.py")}
    assert set(FLOORS) <= places
