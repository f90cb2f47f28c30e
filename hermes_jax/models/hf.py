"""Hugging Face model folders: `load_model` reads one, `save_model` writes one.

Neither torch nor transformers' modelling code is used. Reading maps the files and moves one tensor at a time onto the
devices; writing holds one tensor at a time on the host and appears at its place by one rename.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from functools import lru_cache, partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec, Sharding, SingleDeviceSharding
from jax.typing import DTypeLike

from hermes_jax.models.config import ModelConfig
from hermes_jax.models.export_folder import copy_companions, replace_folder
from hermes_jax.models.folder import INDEX, SINGLE, load_config, stored_tensors
from hermes_jax.models.names import TIED_HEAD, HFTensor, Leaf, build, leaves
from hermes_jax.models.safetensors_io import ModelFolderError, StoredTensor, n_bytes, read_ahead, write_file
from hermes_jax.models.transformer import Params


def load_model(folder: str | Path, shardings: Any = None, dtype: DTypeLike = jnp.float32) -> tuple[ModelConfig, Params]:
    """Loads a folder in Hugging Face format (one safetensors file or several with an index).

    Args:
        folder: config.json and safetensors files in float32, float16 or bfloat16.
        shardings: tree like the parameters (see `abstract_params`) of `jax.sharding.Sharding`; every device gets only
            its part. None = everything on the first device.
        dtype: of the parameters; training wants fp32 masters.

    Raises:
        ModelFolderError: something is missing, damaged or of the wrong shape; names file, tensor and remedy.
        ValueError: as `load_config`.
    """
    folder = Path(folder)
    config = load_config(folder)
    stored = stored_tensors(folder, config)
    read_ahead(sorted({tensor.file for tensor in stored.values()}))
    pairs = []
    for leaf in leaves(config):
        sharding = SingleDeviceSharding(jax.devices()[0]) if shardings is None else leaf.of(shardings)
        pairs.append((leaf, _load_leaf(leaf, stored, sharding, jnp.dtype(dtype))))
    return config, build(pairs)


def save_model(
    params: Params,
    config: ModelConfig,
    source_folder: str | Path,
    to: str | Path,
    dtype: DTypeLike | None = None,
    max_shard_bytes: int = 5_000_000_000,
) -> None:
    """Writes a folder that transformers and vLLM load: weights, config, tokenizer, chat template, generation config.

    Everything is written aside on the same file system, flushed to the disk and renamed; an export that stands at `to`
    is replaced whole or not at all. Tensors keep the names and dtypes of the source folder.

    Args:
        params: stacked or unstacked.
        config: of the parameters; must be that of `source_folder`.
        source_folder: the model that training started from.
        to: may exist if it is an earlier export or empty.
        dtype: of all tensors; None = each tensor as in the source folder, byte for byte where it was not trained.
        max_shard_bytes: larger models become several files and an index.

    Raises:
        ModelFolderError: source unusable, `to` in use by something else, disk full; `to` is left as it was.
    """
    source, target = Path(source_folder), Path(to)
    if load_config(source) != config:
        raise ModelFolderError(f"{source}/config.json describes another model than the parameters: name the right one")
    stored = stored_tensors(source, config)
    dtypes = {name: tensor.dtype if dtype is None else np.dtype(dtype) for name, tensor in stored.items()}
    written = _tensors_to_write(config, dtypes)

    def fill(folder: Path) -> None:
        _write_weights(folder, params, written, dtypes, max_shard_bytes)
        copy_companions(source, folder, None if dtype is None else np.dtype(dtype).name)

    replace_folder(target, fill, keep=source)


def _load_leaf(leaf: Leaf, stored: Mapping[str, StoredTensor], sharding: Sharding, dtype: np.dtype) -> jax.Array:
    if leaf.tensors[0].layer is None:
        return _copier(sharding, dtype)(_on_devices(stored[leaf.tensors[0].name], sharding))
    stack = jax.jit(partial(jnp.zeros, leaf.shape, dtype), out_shardings=sharding)()
    for tensor in leaf.tensors:
        part = _on_devices(stored[tensor.name], _layer_sharding(sharding, len(leaf.shape) - 1, tensor.transposed))
        stack = _layer_writer(sharding, tensor.transposed)(stack, part, tensor.layer).block_until_ready()
    return stack


def _on_devices(tensor: StoredTensor, sharding: Sharding) -> jax.Array:
    """Each device reads its part of the file. The array may lie over the file: what is kept is computed from it."""
    view = tensor.read()
    return jax.make_array_from_callback(tensor.shape, sharding, lambda index: view[index])


def _layer_sharding(sharding: Sharding, rank: int, transposed: bool) -> Sharding:
    """How one layer's tensor lies on the mesh, given its stacked leaf's sharding."""
    if not isinstance(sharding, NamedSharding):
        return sharding
    spec = (*sharding.spec, *[None] * (rank + 1 - len(sharding.spec)))[1:]
    return NamedSharding(sharding.mesh, PartitionSpec(*(spec[::-1] if transposed else spec)))


@lru_cache(maxsize=256)
def _layer_writer(sharding: Sharding, transposed: bool) -> Callable[..., jax.Array]:
    def write(stack: jax.Array, part: jax.Array, layer: int) -> jax.Array:
        return stack.at[layer].set((part.T if transposed else part).astype(stack.dtype))

    return jax.jit(write, donate_argnums=0, out_shardings=sharding)


@lru_cache(maxsize=256)
def _copier(sharding: Sharding, dtype: np.dtype) -> Callable[[jax.Array], jax.Array]:
    """Converts into an array that jax owns: one over numpy's memory could not be donated."""
    return jax.jit(lambda x: jnp.copy(x).astype(dtype), out_shardings=sharding)


def _tensors_to_write(config: ModelConfig, dtypes: Mapping[str, np.dtype]) -> dict[str, tuple[Leaf, HFTensor]]:
    """Source of each tensor by name, layer by layer; a tied head that the source stored is stored again."""
    found = {tensor.name: (leaf, tensor) for leaf in leaves(config) for tensor in leaf.tensors}
    if TIED_HEAD in dtypes:
        found.setdefault(TIED_HEAD, found["model.embed_tokens.weight"])
    return dict(sorted(found.items(), key=lambda item: -1 if item[1][1].layer is None else item[1][1].layer))


def _write_weights(
    folder: Path,
    params: Params,
    written: Mapping[str, tuple[Leaf, HFTensor]],
    dtypes: Mapping[str, np.dtype],
    max_shard_bytes: int,
) -> None:
    layout = {name: (dtypes[name], tensor.shape) for name, (_, tensor) in written.items()}
    shards = _shards(layout, max_shard_bytes)
    files = [SINGLE] if len(shards) == 1 else _shard_names(len(shards))

    def arrays(names: list[str]) -> Iterator[np.ndarray]:
        return (_to_host(params, *written[name], dtypes[name]) for name in names)

    for file, names in zip(files, shards, strict=True):
        write_file(folder / file, {name: layout[name] for name in names}, arrays(names))
    if len(shards) > 1:
        total = sum(n_bytes(*entry) for entry in layout.values())
        weight_map = {name: file for file, names in zip(files, shards, strict=True) for name in names}
        index = {"metadata": {"total_size": total}, "weight_map": dict(sorted(weight_map.items()))}
        (folder / INDEX).write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")


def _shard_names(count: int) -> list[str]:
    return [f"model-{i:05d}-of-{count:05d}.safetensors" for i in range(1, count + 1)]


def _shards(layout: Mapping[str, tuple[np.dtype, tuple[int, ...]]], limit: int) -> list[list[str]]:
    """Names in order, cut where a file would become larger than `limit` bytes."""
    shards: list[list[str]] = [[]]
    size = 0
    for name, entry in layout.items():
        if shards[-1] and size + n_bytes(*entry) > limit:
            shards.append([])
            size = 0
        shards[-1].append(name)
        size += n_bytes(*entry)
    return shards


def _to_host(params: Params, leaf: Leaf, tensor: HFTensor, dtype: np.dtype) -> np.ndarray:
    if tensor.layer is not None and isinstance(params["layers"], tuple):
        value, layer = Leaf(leaf.path[1:], leaf.shape[1:], ()).of(params["layers"][tensor.layer]), None
    else:
        value, layer = leaf.of(params), tensor.layer
    return np.asarray(_taken(value, layer, tensor.transposed, dtype))


@partial(jax.jit, static_argnums=(2, 3))
def _taken(value: jax.Array, layer: int | None, transposed: bool, dtype: np.dtype) -> jax.Array:
    value = value if layer is None else value[layer]
    return (value.T if transposed else value).astype(dtype)
