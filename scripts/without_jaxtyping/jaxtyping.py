"""Stands in for jaxtyping where that is not installed and nothing can be fetched (`scripts/gpu_check.sh`).

The package uses jaxtyping in annotations only, so names that mean nothing do as well. Nothing is checked with them.
"""

from typing import Any


class AnyShape:
    """Takes a shape and forgets it: `Float[Array, "batch time"]`."""

    def __class_getitem__(cls, _: Any) -> type:
        return cls


def __getattr__(name: str) -> type:
    if name.startswith("__"):
        raise AttributeError(name)
    return AnyShape
