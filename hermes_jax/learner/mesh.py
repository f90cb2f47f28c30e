"""The device mesh and where parameters and batches lie on it.

Axes: `data` (rows of a batch, parameters replicated), `fsdp` (rows of a batch, parameters sharded) and `tensor` (heads,
MLP and vocabulary sharded). A single device is the mesh (1, 1, 1): there is no other code path.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from hermes_jax.models.config import ModelConfig

AXES = ("data", "fsdp", "tensor")
ROWS = ("data", "fsdp")

# Axis of each trailing dimension, by the end of the leaf's path; a leading layer dimension is never sharded.
_RULES: tuple[tuple[tuple[str, ...], tuple[str | None, ...]], ...] = (
    (("embed", "embedding"), ("tensor", "fsdp")),
    (("head", "weight"), ("tensor", "fsdp")),
    (("q", "kernel"), ("fsdp", "tensor")),
    (("k", "kernel"), ("fsdp", "tensor")),
    (("v", "kernel"), ("fsdp", "tensor")),
    (("o", "kernel"), ("tensor", "fsdp")),
    (("gate", "kernel"), ("fsdp", "tensor")),
    (("up", "kernel"), ("fsdp", "tensor")),
    (("down", "kernel"), ("tensor", "fsdp")),
    (("q", "bias"), ("tensor",)),
    (("k", "bias"), ("tensor",)),
    (("v", "bias"), ("tensor",)),
    (("gate", "bias"), ("tensor",)),
    (("up", "bias"), ("tensor",)),
)


def make_mesh(data: int = 1, fsdp: int = 1, tensor: int = 1, *, devices: Sequence[jax.Device] | None = None) -> Mesh:
    """A mesh over the first `data * fsdp * tensor` devices.

    Raises:
        ValueError: a size is below 1, or there are too few devices.
    """
    shape = (data, fsdp, tensor)
    available = list(jax.devices() if devices is None else devices)
    needed = data * fsdp * tensor
    if min(shape) < 1 or needed > len(available):
        raise ValueError(
            f"mesh data={data}, fsdp={fsdp}, tensor={tensor} needs {needed} devices, there are {len(available)} "
            f"({available[0].platform}); sizes are >= 1"
        )
    return jax.make_mesh(shape, AXES, axis_types=(AxisType.Auto,) * 3, devices=available[:needed])


def check_mesh(mesh: Mesh, config: ModelConfig) -> None:
    """Refuses a tensor axis that cuts through attention heads or the MLP.

    Raises:
        ValueError: names the size that `tensor` must divide.
    """
    tensor = mesh.shape["tensor"]
    for name, size in (("attention heads", config.n_heads), ("MLP channels", config.intermediate_size)):
        if size % tensor:
            raise ValueError(f"mesh.tensor={tensor} must divide the model's {size} {name}")


def param_specs(params: Any, mesh: Mesh, config: ModelConfig) -> Any:
    """PartitionSpec of each parameter, by the end of its path.

    What an axis does not divide is replicated over that axis: the vocabulary over `tensor`, key/value heads over
    `tensor` where there are fewer heads than shards, the hidden size over `fsdp`. Norms are replicated.
    """
    check_mesh(mesh, config)
    whole_kv_heads = config.n_kv_heads % mesh.shape["tensor"] == 0

    def spec(path: tuple[Any, ...], leaf: Any) -> P:
        names = tuple(str(getattr(key, "key", getattr(key, "idx", key))) for key in path)
        axes = next((axes for end, axes in _RULES if names[-2:] == end), ())
        if names[-2:-1] in (("k",), ("v",)) and not whole_kv_heads:
            axes = tuple(None if axis == "tensor" else axis for axis in axes)
        sizes = leaf.shape[leaf.ndim - len(axes) :]
        kept = [axis if axis and size % mesh.shape[axis] == 0 else None for axis, size in zip(axes, sizes, strict=True)]
        return P(*[None] * (leaf.ndim - len(axes)), *kept)

    return jax.tree_util.tree_map_with_path(spec, params)


def param_shardings(params: Any, mesh: Mesh, config: ModelConfig) -> Any:
    """`param_specs` as shardings on the mesh; `params` may be abstract."""
    return jax.tree.map(lambda spec: NamedSharding(mesh, spec), param_specs(params, mesh, config))


def batch_spec(*, micro: bool = True) -> P:
    """Rows over (data, fsdp); the micro-batch axis and the width are whole."""
    return P(None, ROWS, None) if micro else P(ROWS, None)


def row_shards(mesh: Mesh) -> int:
    """Over how many devices the rows of a batch are spread."""
    return mesh.shape["data"] * mesh.shape["fsdp"]


def check_rows(shape: Sequence[int], mesh: Mesh) -> None:
    """Refuses a batch `[micro, rows, width]` whose rows the mesh can't spread evenly.

    Raises:
        ValueError: says which number the rows must be a multiple of.
    """
    shards = row_shards(mesh)
    if len(shape) != 3 or shape[1] % shards:
        raise ValueError(
            f"a batch is [micro, rows, width] with rows a multiple of data x fsdp = {shards}, got {list(shape)}; "
            f"make the packing buckets with row_multiple={shards}"
        )


def replicated(mesh: Mesh) -> NamedSharding:
    """The same value on every device."""
    return NamedSharding(mesh, P())
