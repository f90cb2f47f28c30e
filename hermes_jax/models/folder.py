"""What lies in a Hugging Face model folder: its config and its tensors, checked against each other by the headers."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from hermes_jax.models.config import ModelConfig
from hermes_jax.models.names import TIED_HEAD, leaves
from hermes_jax.models.safetensors_io import ModelFolderError, StoredTensor, read_header

SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"
_RECOMPUTED = ".rotary_emb.inv_freq"  # in old Llama files; follows from config.json


def load_config(folder: str | Path) -> ModelConfig:
    """Reads the folder's `config.json`.

    Raises:
        ModelFolderError: folder or file missing or unreadable.
        ValueError: the config asks for something unsupported (`UnsupportedModelError`) or is senseless.
    """
    folder = Path(folder)
    if not folder.is_dir():
        raise ModelFolderError(f"no model folder {folder}: download the model there, or correct the path")
    return ModelConfig.from_hf(_read_json(folder / "config.json"))


def stored_tensors(folder: Path, config: ModelConfig) -> dict[str, StoredTensor]:
    """Every tensor of the folder by name, from the headers alone; exactly those that `config` asks for.

    A tied model may store its head too, if it equals the embedding.

    Raises:
        ModelFolderError: something is missing, damaged, unexpected or of the wrong shape; names file, tensor, remedy.
    """
    stored = _stored_tensors(folder)
    _check(config, stored, folder)
    return stored


def _read_json(file: Path) -> Mapping[str, Any]:
    if not file.is_file():
        raise ModelFolderError(f"{file} is missing: copy it from the model's source")
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ModelFolderError(f"{file} is no valid JSON ({error}): copy it again") from error
    if not isinstance(content, dict):
        raise ModelFolderError(f"{file} holds no JSON object: copy it again")
    return content


def _stored_tensors(folder: Path) -> dict[str, StoredTensor]:
    """Every tensor of the folder by name, from the headers alone."""
    if (folder / SINGLE).is_file():
        found = read_header(folder / SINGLE)
    elif (folder / INDEX).is_file():
        found = _from_index(folder)
    else:
        raise ModelFolderError(
            f"{folder} holds neither {SINGLE} nor {INDEX}: other formats are not read; "
            "save the model once with transformers' save_pretrained"
        )
    return {name: tensor for name, tensor in found.items() if not name.endswith(_RECOMPUTED)}


def _from_index(folder: Path) -> dict[str, StoredTensor]:
    weight_map = _read_json(folder / INDEX).get("weight_map")
    if not isinstance(weight_map, dict):
        raise ModelFolderError(f"{folder / INDEX} has no weight_map: copy the file again")
    found: dict[str, StoredTensor] = {}
    for shard in sorted(set(weight_map.values())):
        if not (folder / shard).is_file():
            raise ModelFolderError(f"{folder / shard} is missing, but {INDEX} names it: copy that file")
        found.update(read_header(folder / shard))
    for name, shard in weight_map.items():
        if name not in found:
            raise ModelFolderError(
                f"{folder / shard} lacks tensor {name}, which {INDEX} promises: copy both files again"
            )
    return found


def _check(config: ModelConfig, stored: Mapping[str, StoredTensor], folder: Path) -> None:
    wanted = {tensor.name: tensor for leaf in leaves(config) for tensor in leaf.tensors}
    missing = [name for name in wanted if name not in stored]
    if missing:
        hint = (
            "set tie_word_embeddings in config.json if the head is tied" if missing == [TIED_HEAD] else "copy it again"
        )
        raise ModelFolderError(f"{folder} lacks {_listed(missing)}, which config.json asks for: {hint}")
    unexpected = [name for name in stored if name not in wanted and not (name == TIED_HEAD and config.tied)]
    if unexpected:
        file = stored[unexpected[0]].file
        raise ModelFolderError(
            f"{file} holds {_listed(unexpected)}, which a {config.model_type} model of this config.json does not have: "
            "config.json and weights belong to different models, or the model needs code that this package lacks"
        )
    for name, tensor in wanted.items():
        if stored[name].shape != tensor.shape:
            raise ModelFolderError(
                f"{stored[name].file}: tensor {name} has shape {list(stored[name].shape)}, "
                f"config.json asks for {list(tensor.shape)}: config.json and weights belong to different models"
            )
    if config.tied and TIED_HEAD in stored:
        _check_tied_head(stored[TIED_HEAD], stored["model.embed_tokens.weight"])


def _check_tied_head(head: StoredTensor, embedding: StoredTensor) -> None:
    if head.shape != embedding.shape or not np.array_equal(head.read(), embedding.read()):
        raise ModelFolderError(
            f"{head.file}: {TIED_HEAD} differs from the embedding although config.json ties them: "
            "set tie_word_embeddings to false in config.json"
        )


def _listed(names: list[str]) -> str:
    more = f" and {len(names) - 3} more" if len(names) > 3 else ""
    return f"tensor{'s' if len(names) > 1 else ''} {', '.join(names[:3])}{more}"
