"""The optimizer against AdamW written out in float64, and its schedules against their definitions."""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from hermes_jax.learner.optimizer import OptimizerConfig, clip_factor, decay_mask, make_optimizer, make_schedule

PARAMS = {
    "embed": {"embedding": (5, 4)},
    "layers": {"attn": {"q": {"kernel": (2, 4, 4), "bias": (2, 4)}}, "attn_norm": {"scale": (2, 4)}},
    "final_norm": {"scale": (4,)},
    "head": {"weight": (5, 4)},
}


def random_tree(seed: int):
    rng = np.random.default_rng(seed)
    return jax.tree.map(lambda shape: rng.normal(size=shape), PARAMS, is_leaf=lambda x: isinstance(x, tuple))


def as_float32(tree):
    return jax.tree.map(lambda x: jnp.asarray(x, jnp.float32), tree)


def reference_adamw(params, gradients, config: OptimizerConfig, decays):
    """Algorithm 2 of arXiv:1711.05101 with the learning rate folded into the decay, in float64."""
    m, v = (jax.tree.map(np.zeros_like, params) for _ in range(2))
    for step, g in enumerate(gradients):
        rate = config.learning_rate * min(1.0, (step + 1) / max(config.warmup_steps, 1))
        m = jax.tree.map(lambda m, g: config.b1 * m + (1 - config.b1) * g, m, g)
        v = jax.tree.map(lambda v, g: config.b2 * v + (1 - config.b2) * g * g, v, g)

        def moved(p, m, v, decay, step=step, rate=rate):
            direction = (m / (1 - config.b1 ** (step + 1))) / (np.sqrt(v / (1 - config.b2 ** (step + 1))) + config.eps)
            return p - rate * (direction + config.weight_decay * p * decay)

        params = jax.tree.map(moved, params, m, v, decays)
    return params


def test_ten_updates_equal_adamw_in_float64():
    config = OptimizerConfig(learning_rate=1e-2, warmup_steps=3, weight_decay=0.1, b1=0.8, b2=0.95)
    optimizer = make_optimizer(config)
    start, gradients = random_tree(0), [random_tree(seed) for seed in range(1, 11)]
    params = as_float32(start)
    state = optimizer.init(params)
    for gradient in gradients:
        updates, state = optimizer.update(as_float32(gradient), state, params)
        params = jax.tree.map(jnp.add, params, updates)
    want = reference_adamw(start, gradients, config, decay_mask(start))
    jax.tree.map(lambda got, want: np.testing.assert_allclose(got, want, rtol=2e-5, atol=2e-6), params, want)


def test_only_matrices_outside_norms_biases_and_embeddings_decay():
    assert decay_mask(random_tree(0)) == {
        "embed": {"embedding": False},
        "layers": {"attn": {"q": {"kernel": True, "bias": False}}, "attn_norm": {"scale": False}},
        "final_norm": {"scale": False},
        "head": {"weight": True},
    }


def test_moments_are_fp32():
    state = make_optimizer(OptimizerConfig(learning_rate=1e-3)).init(as_float32(random_tree(0)))
    dtypes = {str(leaf.dtype) for leaf in jax.tree.leaves(state) if leaf.ndim}
    assert dtypes == {"float32"}


def test_warmup_then_constant():
    schedule = make_schedule(OptimizerConfig(learning_rate=2.0, warmup_steps=4))
    np.testing.assert_allclose([schedule(k) for k in range(7)], [0.5, 1.0, 1.5, 2.0, 2.0, 2.0, 2.0], rtol=1e-6)


def test_no_warmup_starts_at_the_peak():
    assert float(make_schedule(OptimizerConfig(learning_rate=2.0))(0)) == 2.0


@pytest.mark.parametrize("name", ["cosine", "linear"])
def test_falling_schedules_reach_their_end_at_total_steps(name):
    config = OptimizerConfig(learning_rate=1.0, schedule=name, warmup_steps=10, total_steps=110, end_fraction=0.1)
    schedule = make_schedule(config)
    halfway = {"cosine": 0.1 + 0.9 * 0.5 * (1 + math.cos(math.pi / 2)), "linear": 0.55}[name]
    got = [float(schedule(k)) for k in (0, 9, 10, 60, 110, 500)]
    np.testing.assert_allclose(got, [0.1, 1.0, 1.0, halfway, 0.1, 0.1], rtol=1e-5)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"schedule": "cosine"}, "needs total_steps > warmup_steps=0, got total_steps=None"),
        ({"schedule": "linear", "warmup_steps": 9, "total_steps": 9}, "needs total_steps > warmup_steps=9"),
        ({"schedule": "exp"}, "constant, cosine or linear, got 'exp'"),
        ({"max_grad_norm": 0.0}, "must be > 0, or None"),
    ],
)
def test_senseless_settings_are_refused(changes, message):
    with pytest.raises(ValueError, match=message):
        OptimizerConfig(learning_rate=1e-3, **changes)


@pytest.mark.parametrize(
    ("norm", "bound", "factor"), [(4.0, 1.0, 0.25), (0.5, 1.0, 1.0), (0.0, 1.0, 1.0), (4.0, None, 1.0)]
)
def test_clip_factor(norm, bound, factor):
    assert float(clip_factor(jnp.float32(norm), bound)) == pytest.approx(factor)
