"""Which tensor of a Hugging Face checkpoint is which leaf of the parameters, both ways."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from hermes_jax.models.config import ModelConfig
from hermes_jax.models.transformer import Params, abstract_params

TIED_HEAD = "lm_head.weight"
_TOP = {
    ("embed", "embedding"): "model.embed_tokens.weight",
    ("final_norm", "scale"): "model.norm.weight",
    ("head", "weight"): TIED_HEAD,
}
_LAYER = {
    "attn_norm": "input_layernorm",
    "attn.q": "self_attn.q_proj",
    "attn.k": "self_attn.k_proj",
    "attn.v": "self_attn.v_proj",
    "attn.o": "self_attn.o_proj",
    "attn.q_norm": "self_attn.q_norm",
    "attn.k_norm": "self_attn.k_norm",
    "mlp_norm": "post_attention_layernorm",
    "mlp.gate": "mlp.gate_proj",
    "mlp.up": "mlp.up_proj",
    "mlp.down": "mlp.down_proj",
}
_KIND = {"kernel": "weight", "scale": "weight", "bias": "bias"}


@dataclass(frozen=True)
class HFTensor:
    """One tensor of a checkpoint.

    Args:
        name: in the checkpoint.
        shape: in the checkpoint ([out, in] for matrices; ours are [in, out]).
        layer: index on the leading axis of our leaf, None = the leaf has no layer axis.
        transposed: our leaf holds the transpose.
    """

    name: str
    shape: tuple[int, ...]
    layer: int | None = None
    transposed: bool = False


@dataclass(frozen=True)
class Leaf:
    """One leaf of the parameters and the tensors it is made of (one per layer, or just one)."""

    path: tuple[str, ...]
    shape: tuple[int, ...]
    tensors: tuple[HFTensor, ...]

    def of(self, tree: Any) -> Any:
        """The leaf of this path in a tree of the parameters' structure."""
        for key in self.path:
            tree = tree[key]
        return tree


def leaves(config: ModelConfig) -> list[Leaf]:
    """Every leaf of the parameters of this model, in a fixed order."""
    return [_leaf(path, shape) for path, shape in _walk(abstract_params(config))]


def build(pairs: Sequence[tuple[Leaf, Any]]) -> Params:
    """The tree that has these values at these leaves."""
    tree: Params = {}
    for leaf, value in pairs:
        node = tree
        for key in leaf.path[:-1]:
            node = node.setdefault(key, {})
        node[leaf.path[-1]] = value
    return tree


def _walk(tree: Any, path: tuple[str, ...] = ()) -> list[tuple[tuple[str, ...], tuple[int, ...]]]:
    if not isinstance(tree, dict):
        return [(path, tuple(tree.shape))]
    return [found for key, value in tree.items() for found in _walk(value, (*path, key))]


def _leaf(path: tuple[str, ...], shape: tuple[int, ...]) -> Leaf:
    if path in _TOP:
        return Leaf(path, shape, (HFTensor(_TOP[path], shape),))
    module, kind = _LAYER[".".join(path[1:-1])], path[-1]
    transposed = kind == "kernel"
    stored = shape[:0:-1] if transposed else shape[1:]
    names = (f"model.layers.{layer}.{module}.{_KIND[kind]}" for layer in range(shape[0]))
    return Leaf(path, shape, tuple(HFTensor(name, stored, i, transposed) for i, name in enumerate(names)))
