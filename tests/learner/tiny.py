"""A tiny model and trajectories with all their log-probs, in any packing."""

from __future__ import annotations

from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np

from hermes_jax.data.buckets import Buckets
from hermes_jax.data.packing import PackedBatch, TrainingSequence, pack
from hermes_jax.data.trajectory import Trajectory
from hermes_jax.learner.logprobs import ForwardOptions
from hermes_jax.learner.mesh import make_mesh
from hermes_jax.learner.score import make_score
from hermes_jax.models.config import ModelConfig
from hermes_jax.models.transformer import abstract_params

WIDTH = 48
BANNED = np.arange(64) >= 60
OPTIONS = ForwardOptions(banned=BANNED)


def tiny_config(**changes) -> ModelConfig:
    hf = {
        "model_type": "qwen3",
        "vocab_size": 64,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "tie_word_embeddings": False,
    }
    return ModelConfig.from_hf(hf | changes)


def tiny_params(config: ModelConfig, seed: int = 0):
    """Sharp enough that a mistake shows: norms differ from one, biases from zero."""
    rng = np.random.default_rng(seed)

    def fill(path, leaf):
        centre = 1.0 if path[-1].key == "scale" else 0.0
        return jnp.asarray(centre + 0.15 * rng.standard_normal(leaf.shape), jnp.float32)

    return jax.tree_util.tree_map_with_path(fill, abstract_params(config))


def tiny_sequences(count: int = 10, seed: int = 0, longest: int = WIDTH) -> list[TrainingSequence]:
    """Prompt, then turns of the policy with tool results between them; one trajectory trains nothing."""
    rng = np.random.default_rng(seed)
    sequences = []
    for number in range(count):
        length = int(rng.integers(6, longest + 1))
        mask = np.arange(length) >= rng.integers(2, 5)
        hole = int(rng.integers(3, length))
        mask[hole : hole + 3] = False
        trajectory = Trajectory(
            tokens=rng.integers(0, 60, length),
            mask=mask,
            logprobs=np.where(mask, -1.0, 0.0),
            temperature=np.where(mask, 0.7, 1.0),
            policy_version=np.where(mask, 0, -1),
            turn=np.where(mask, 0, -1),
        )
        loss_mask = mask if number else np.zeros(length, bool)
        sequences.append(TrainingSequence(trajectory, float(rng.normal()), loss_mask, number // 4))
    return sequences


class Step:
    """Trajectories with old, reference and rollout log-probs that lie near the policy's own."""

    def __init__(self, config: ModelConfig, params, sequences: Sequence[TrainingSequence], seed: int = 0):
        self.sequences = sequences
        batch, layout = pack(sequences, Buckets(((1, len(sequences), WIDTH),)), one_per_row=True)
        own, _ = make_score(config, make_mesh(), OPTIONS)(params, batch)
        rng = np.random.default_rng(seed)
        own = layout.gather(own)
        self.logprobs = {
            name: [np.float32(x + rng.normal(0, 0.2, x.shape)) for x in own]
            for name in ("old_logprobs", "ref_logprobs", "rollout_logprobs")
        }

    def batch(self, shape: tuple[int, int, int], *, one_per_row: bool = False) -> PackedBatch:
        batch, layout = pack(self.sequences, Buckets((shape,)), one_per_row=one_per_row)
        return batch._replace(**{name: layout.scatter(values) for name, values in self.logprobs.items()})


def assert_same_gradient(got, want, tolerance: float = 1e-5) -> None:
    """|difference| <= tolerance * max of the leaf."""

    def compare(path, got, want):
        error = np.abs(np.asarray(got, np.float64) - np.asarray(want, np.float64)).max()
        assert np.abs(want).max() > 0, f"{jax.tree_util.keystr(path)} has no gradient"
        assert error <= tolerance * np.abs(want).max(), (
            f"{jax.tree_util.keystr(path)}: {error / np.abs(want).max():.1e}"
        )

    jax.tree_util.tree_map_with_path(compare, got, want)


def same_bits(first, second) -> bool:
    """Whether two trees of arrays are equal to the last bit."""
    pairs = zip(jax.tree.leaves(first), jax.tree.leaves(second), strict=True)
    return all(np.asarray(a).tobytes() == np.asarray(b).tobytes() for a, b in pairs)
