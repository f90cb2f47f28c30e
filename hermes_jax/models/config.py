"""What a model looks like, read from a Hugging Face `config.json`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import log
from typing import Any

SUPPORTED_MODELS = ("llama", "mistral", "qwen2", "qwen3")
SUPPORTED_ROPE = ("default", "linear", "llama3", "yarn")
_NEEDED = (
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "max_position_embeddings",
)
_DEFAULT_THETA = 10_000.0
_QWEN = {"num_key_value_heads": 32, "max_position_embeddings": 32_768, "sliding_window": 4096, "max_window_layers": 28}
_DEFAULTS: Mapping[str, Mapping[str, Any]] = {  # what an absent key means in each family
    "llama": {"max_position_embeddings": 2048},
    "mistral": {"num_key_value_heads": 8, "max_position_embeddings": 131_072, "sliding_window": 4096},
    "qwen2": _QWEN,
    "qwen3": {**_QWEN, "head_dim": 128},
}


class UnsupportedModelError(ValueError):
    """A `config.json` asks for something this package does not compute; the message names the key."""


@dataclass(frozen=True)
class RopeConfig:
    """Rotary position embedding.

    Args:
        kind: "default", "linear" (positions / factor), "llama3" (long wavelengths * factor), "yarn" (arXiv:2309.00071).
        theta: base of the wavelengths.
        factor: how much longer the context is than `original_length`.
        original_length: context of the pretraining, in tokens (llama3, yarn).
        low_freq_factor, high_freq_factor: band in which llama3 interpolates.
        beta_fast, beta_slow: band (in rotations over the original context) in which yarn interpolates.
        truncate: yarn rounds the band outward to whole dimensions.
        attention_factor: multiplies cos and sin.
    """

    kind: str = "default"
    theta: float = _DEFAULT_THETA
    factor: float = 1.0
    original_length: int = 0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    truncate: bool = True
    attention_factor: float = 1.0


@dataclass(frozen=True)
class ModelConfig:
    """A decoder-only transformer with grouped-query attention and a SwiGLU MLP; hashable: a static argument of jit.

    Args:
        model_type: Hugging Face family name, one of `SUPPORTED_MODELS`.
        vocab_size: rows of the embedding, padding of the vocabulary included.
        hidden_size, intermediate_size, head_dim: widths.
        n_layers, n_heads, n_kv_heads: counts.
        max_length: `max_position_embeddings`, in tokens.
        norm_eps: epsilon of every RMS norm.
        rope: rotary embedding.
        tied: the head is the embedding.
        qkv_bias, out_bias, mlp_bias: which projections have a bias.
        qk_norm: RMS norm over the head dimension of q and k (Qwen3).
        windows: per layer, how many positions a token sees, itself included; None = all before it.
    """

    model_type: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    n_layers: int
    n_heads: int
    n_kv_heads: int
    head_dim: int
    max_length: int
    norm_eps: float
    rope: RopeConfig
    tied: bool
    qkv_bias: bool
    out_bias: bool
    mlp_bias: bool
    qk_norm: bool
    windows: tuple[int | None, ...]

    @classmethod
    def from_hf(cls, hf: Mapping[str, Any]) -> ModelConfig:
        """Reads the content of a `config.json`, old and new rope keys alike.

        Raises:
            UnsupportedModelError: a key asks for what is not built; names the key, its value and what is supported.
            ValueError: a key is missing or senseless.
        """
        model_type = _check_supported(hf)
        hf = {**_DEFAULTS[model_type], **hf}
        missing = [key for key in _NEEDED if not isinstance(hf.get(key), int) or hf[key] < 1]
        if missing:
            raise ValueError(f"config.json: {', '.join(missing)} missing or no positive integer; copy the model's own")
        n_heads = hf["num_attention_heads"]
        n_kv_heads = hf.get("num_key_value_heads") or n_heads
        if n_heads % n_kv_heads:
            raise ValueError(
                f"config.json: num_attention_heads={n_heads} is no multiple of num_key_value_heads={n_kv_heads}"
            )
        attention_bias = bool(hf.get("attention_bias", False)) and model_type in ("llama", "qwen3")
        return cls(
            model_type=model_type,
            vocab_size=hf["vocab_size"],
            hidden_size=hf["hidden_size"],
            intermediate_size=hf["intermediate_size"],
            n_layers=hf["num_hidden_layers"],
            n_heads=n_heads,
            n_kv_heads=n_kv_heads,
            head_dim=_head_dim(hf),
            max_length=hf["max_position_embeddings"],
            norm_eps=float(hf.get("rms_norm_eps", 1e-6)),
            rope=_rope(hf),
            tied=bool(hf.get("tie_word_embeddings", False)),
            qkv_bias=attention_bias or model_type == "qwen2",
            out_bias=attention_bias,
            mlp_bias=bool(hf.get("mlp_bias", False)) and model_type == "llama",
            qk_norm=model_type == "qwen3",
            windows=_windows(hf, model_type),
        )


def _check_supported(hf: Mapping[str, Any]) -> str:
    model_type = hf.get("model_type")
    if model_type not in SUPPORTED_MODELS:
        raise UnsupportedModelError(
            f"config.json: model_type={model_type!r} is not supported; supported are {', '.join(SUPPORTED_MODELS)}"
        )
    activation = hf.get("hidden_act", "silu")
    if activation not in ("silu", "swish"):
        raise UnsupportedModelError(f"config.json: hidden_act={activation!r} is not supported; supported is silu")
    if hf.get("quantization_config"):
        raise UnsupportedModelError(
            "config.json: quantization_config is not supported; export the model in float32, float16 or bfloat16"
        )
    return str(model_type)


def _head_dim(hf: Mapping[str, Any]) -> int:
    head_dim = int(hf.get("head_dim") or hf["hidden_size"] // hf["num_attention_heads"])
    if head_dim % 2:
        raise ValueError(f"config.json: head_dim={head_dim} is odd, but rotary embedding pairs dimensions")
    return head_dim


def _windows(hf: Mapping[str, Any], model_type: str) -> tuple[int | None, ...]:
    n_layers, window = hf["num_hidden_layers"], hf.get("sliding_window")
    switched_off = model_type != "mistral" and not hf.get("use_sliding_window", False)
    if model_type == "llama" or window is None or switched_off:
        return (None,) * n_layers
    if model_type == "mistral":
        return (int(window),) * n_layers
    kinds = hf.get("layer_types") or _kinds_from_max_window_layers(hf, n_layers)
    unknown = set(kinds) - {"sliding_attention", "full_attention"}
    if unknown or len(kinds) != n_layers:
        raise UnsupportedModelError(
            f"config.json: layer_types={list(kinds)} must hold {n_layers} of sliding_attention, full_attention"
        )
    return tuple(int(window) if kind == "sliding_attention" else None for kind in kinds)


def _kinds_from_max_window_layers(hf: Mapping[str, Any], n_layers: int) -> list[str]:
    return ["sliding_attention" if layer >= hf["max_window_layers"] else "full_attention" for layer in range(n_layers)]


def _rope(hf: Mapping[str, Any]) -> RopeConfig:
    """`rope_parameters` (newer files) or `rope_scaling` and `rope_theta` (older files)."""
    key = "rope_scaling" if hf.get("rope_scaling") else "rope_parameters"
    given = dict(hf.get(key) or {})
    kind = given.get("rope_type") or given.get("type") or "default"
    if kind not in SUPPORTED_ROPE:
        raise UnsupportedModelError(
            f"config.json: {key}.rope_type={kind!r} is not supported; supported are {', '.join(SUPPORTED_ROPE)}"
        )
    nested = sorted(name for name, value in given.items() if isinstance(value, Mapping))
    if nested:
        raise UnsupportedModelError(f"config.json: {key} differs by layer type ({', '.join(nested)}): not supported")
    partial = given.get("partial_rotary_factor", hf.get("partial_rotary_factor", 1.0))
    if partial not in (None, 1, 1.0):
        raise UnsupportedModelError(f"config.json: partial_rotary_factor={partial} is not supported; supported is 1.0")
    theta = float(given.get("rope_theta") or hf.get("rope_theta") or _DEFAULT_THETA)
    if kind == "default":
        return RopeConfig(theta=theta)
    return _scaled_rope(kind, theta, given, key, hf)


def _scaled_rope(kind: str, theta: float, given: Mapping[str, Any], key: str, hf: Mapping[str, Any]) -> RopeConfig:
    original = hf.get("original_max_position_embeddings") or given.get("original_max_position_embeddings")
    original = int(original or hf["max_position_embeddings"])
    factor = given.get("factor")
    if factor is None and kind == "yarn":
        factor = hf["max_position_embeddings"] / original
    needed = ("low_freq_factor", "high_freq_factor") if kind == "llama3" else ()
    missing = [name for name in needed if given.get(name) is None] + (["factor"] if factor is None else [])
    if missing:
        raise ValueError(f"config.json: {key} of type {kind} needs {', '.join(missing)}")
    factor = float(factor or 1.0)
    return RopeConfig(
        kind=kind,
        theta=theta,
        factor=factor,
        original_length=original,
        low_freq_factor=float(given.get("low_freq_factor") or 1.0),
        high_freq_factor=float(given.get("high_freq_factor") or 4.0),
        beta_fast=float(given.get("beta_fast") or 32.0),
        beta_slow=float(given.get("beta_slow") or 1.0),
        truncate=bool(given.get("truncate", True)),
        attention_factor=_attention_factor(factor, given) if kind == "yarn" else 1.0,
    )


def _attention_factor(factor: float, given: Mapping[str, Any]) -> float:
    """Yarn's temperature on the attention scores, folded into cos and sin."""
    if given.get("attention_factor") is not None:
        return float(given["attention_factor"])
    mscale, all_dim = given.get("mscale"), given.get("mscale_all_dim")
    if mscale and all_dim:
        return _mscale(factor, mscale) / _mscale(factor, all_dim)
    return _mscale(factor, 1.0)


def _mscale(factor: float, mscale: float) -> float:
    return 1.0 if factor <= 1 else 0.1 * mscale * log(factor) + 1.0
