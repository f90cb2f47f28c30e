"""Jitted functions of (something, packed batch) that compile once per shape, whatever the batch is made of."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import jax
from jax.sharding import Mesh, NamedSharding

from hermes_jax.data.packing import PackedBatch
from hermes_jax.learner.mesh import batch_spec, check_rows


@dataclass(frozen=True, eq=False)
class BatchFunction:
    """Calls `jitted(first, batch)` with the batch placed on the mesh.

    jax compiles anew for each mixture of numpy and device arrays (log-probs that were just scored beside tokens from
    the host), hence everything is placed first.

    Args:
        jitted: from `jax.jit`.
        mesh: rows are spread over its data and fsdp axes.
    """

    jitted: Any
    mesh: Mesh
    _prepared: dict[tuple[int, ...], Any] = field(default_factory=dict, repr=False)

    def __call__(self, first: Any, batch: PackedBatch) -> Any:
        """Runs; returns before the device is done. Raises ValueError if the rows do not spread over the mesh."""
        return self._prepared.get(batch.tokens.shape, self.jitted)(first, self.place(batch))

    def prepare(self, first: Any, batch: PackedBatch) -> None:
        """Compiles for batches of this shape, before the first one comes. Nothing runs, nothing is donated."""
        self._prepared[batch.tokens.shape] = self.lower(first, batch).compile()

    def place(self, batch: PackedBatch) -> PackedBatch:
        """The batch on the mesh; no copy where it lies there already."""
        check_rows(batch.tokens.shape, self.mesh)
        return jax.device_put(batch, NamedSharding(self.mesh, batch_spec()))

    def lower(self, first: Any, batch: PackedBatch) -> Any:
        """The lowered program, for its memory and cost analysis."""
        return self.jitted.lower(first, self.place(batch))

    @property
    def compilations(self) -> int:
        """How many shapes it was compiled for."""
        return self.jitted._cache_size() + len(self._prepared)
