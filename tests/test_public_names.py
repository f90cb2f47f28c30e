"""The table of contents: every name is there, and importing the package loads nothing heavy."""

import subprocess
import sys

import pytest

import hermes_jax


@pytest.mark.parametrize("name", hermes_jax.__all__)
def test_every_public_name_exists(name: str) -> None:
    assert getattr(hermes_jax, name).__name__ == name


def test_an_unknown_name_says_which_there_are() -> None:
    with pytest.raises(AttributeError, match="Trainer"):
        _ = hermes_jax.trainer_of_nothing


def test_importing_the_package_is_light() -> None:
    code = "import sys, hermes_jax; print({'jax', 'numpy', 'transformers', 'torch'} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "set()"
