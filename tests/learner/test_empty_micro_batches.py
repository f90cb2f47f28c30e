"""Micro-batches without a trained token: same numbers, no work. One large shape then serves every step."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np

from hermes_jax.learner.mesh import make_mesh
from hermes_jax.learner.score import make_score
from hermes_jax.learner.update import make_gradient
from hermes_jax.objectives.spec import ObjectiveSpec
from tests.learner.tiny import OPTIONS, Step, same_bits, tiny_config, tiny_params, tiny_sequences

CONFIG = tiny_config()
KNOWN = ("old_logprobs", "ref_logprobs", "rollout_logprobs")
SMALL, LARGE = (2, 4, 64), (9, 4, 64)


def test_the_numbers_are_the_same() -> None:
    params = tiny_params(CONFIG)
    step = Step(CONFIG, params, tiny_sequences(8))
    gradient = jax.jit(
        make_gradient(CONFIG, ObjectiveSpec("clip", beta=0.1, kl="k3"), make_mesh(), OPTIONS, known=KNOWN)
    )
    small, large = step.batch(SMALL), step.batch(LARGE)
    assert not large.loss_mask[2:].any()
    assert same_bits(gradient(params, small), gradient(params, large))
    score = make_score(CONFIG, make_mesh(), OPTIONS)
    for one, other in zip(score(params, small), score(params, large), strict=True):
        np.testing.assert_array_equal(one, other[:2])
        assert not other[2:].any()


def test_no_forward_pass_is_made() -> None:
    """A parameter that is not finite shows who computes with it."""
    params = tiny_params(CONFIG)
    batch = Step(CONFIG, params, tiny_sequences(4)).batch(LARGE)
    empty = batch._replace(loss_mask=np.zeros_like(batch.loss_mask))
    broken = jax.tree.map(lambda leaf: jnp.full_like(leaf, jnp.nan), params)
    loss, grads, metrics = jax.jit(
        make_gradient(CONFIG, ObjectiveSpec("clip", beta=0.1, kl="k3"), make_mesh(), OPTIONS, known=KNOWN)
    )(broken, empty)
    assert loss == 0
    assert not any(leaf.any() for leaf in jax.tree.leaves(grads))
    assert all(value == 0 for value in metrics.values())
