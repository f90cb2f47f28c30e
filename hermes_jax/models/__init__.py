"""Models: configuration, parameters and one forward for learner, scorer and engine; Hugging Face folders both ways."""

from hermes_jax.models.config import ModelConfig, RopeConfig, UnsupportedModelError
from hermes_jax.models.folder import load_config
from hermes_jax.models.head import logits, token_stats
from hermes_jax.models.hf import load_model, save_model
from hermes_jax.models.safetensors_io import ModelFolderError
from hermes_jax.models.tokenizer import banned_ids, load_tokenizer, special_ids, stop_ids
from hermes_jax.models.transformer import (
    KVCache,
    Params,
    abstract_params,
    forward,
    head_weight,
    init_cache,
    init_params,
    unstack_layers,
)

__all__ = [
    "KVCache",
    "ModelConfig",
    "ModelFolderError",
    "Params",
    "RopeConfig",
    "UnsupportedModelError",
    "abstract_params",
    "banned_ids",
    "forward",
    "head_weight",
    "init_cache",
    "init_params",
    "load_config",
    "load_model",
    "load_tokenizer",
    "logits",
    "save_model",
    "special_ids",
    "stop_ids",
    "token_stats",
    "unstack_layers",
]
