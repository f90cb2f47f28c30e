"""The update step: what it changes, what it leaves alone, what it costs."""

from __future__ import annotations

from functools import cache

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from hermes_jax.learner.logprobs import ForwardOptions
from hermes_jax.learner.mesh import make_mesh
from hermes_jax.learner.optimizer import OptimizerConfig, make_optimizer
from hermes_jax.learner.score import make_score
from hermes_jax.learner.state import init_state
from hermes_jax.learner.update import make_update_step
from hermes_jax.objectives.spec import ObjectiveSpec
from tests.learner.tiny import BANNED, OPTIONS, Step, same_bits, tiny_config, tiny_params, tiny_sequences

SHAPE = (2, 4, 64)
CONFIG = tiny_config()
OPTIMIZER = make_optimizer(OptimizerConfig(1e-2, "cosine", warmup_steps=2, total_steps=50, max_grad_norm=0.1))


@cache
def update_step():
    return make_update_step(
        CONFIG, ObjectiveSpec("clip", kl="k3", beta=0.1), OPTIMIZER, make_mesh(), OPTIONS, known=KNOWN
    )


KNOWN = ("old_logprobs", "ref_logprobs", "rollout_logprobs")


@pytest.fixture(scope="module")
def params():
    return tiny_params(CONFIG)


@pytest.fixture(scope="module")
def batches(params):
    return [Step(CONFIG, params, tiny_sequences(8, seed), seed).batch(SHAPE) for seed in range(3)]


def new_state(params):
    return init_state(params, OPTIMIZER, make_mesh(), CONFIG)


def poisoned(batch):
    """The same batch with one advantage of a trained token not finite."""
    advantages = batch.advantages.copy()
    advantages[np.unravel_index(np.argmax(batch.loss_mask), SHAPE)] = np.inf
    return batch._replace(advantages=advantages)


def test_a_step_that_is_not_finite_changes_nothing_but_its_count(params, batches):
    state, _ = update_step()(new_state(params), batches[0])
    before = jax.device_get(state)
    state, metrics = update_step()(state, poisoned(batches[1]))
    after = jax.device_get(state)
    assert not np.isfinite(metrics["loss"])
    assert float(metrics["update_skipped"]) == 1.0
    assert same_bits(before[:3], after[:3]), "parameters, moments, schedule and update count stay bitwise"
    assert (int(after.skipped), int(after.skipped_in_a_row)) == (1, 1)


def test_after_skipped_steps_training_goes_on_as_if_they_had_not_been(params, batches):
    clean, skipping = new_state(params), new_state(params)
    for batch in batches:
        clean, want = update_step()(clean, batch)
        for _ in range(2):
            skipping, _ = update_step()(skipping, poisoned(batch))
        skipping, got = update_step()(skipping, batch)
        assert float(got["learning_rate"]) == float(want["learning_rate"])
    assert same_bits(clean[:3], skipping[:3])
    assert (int(skipping.skipped), int(skipping.skipped_in_a_row)) == (6, 0)
    assert int(clean.update) == 3


def test_the_schedule_counts_updates(params, batches):
    state, rates = new_state(params), []
    for batch in batches:
        state, metrics = update_step()(state, batch)
        rates.append(float(metrics["learning_rate"]))
    np.testing.assert_allclose(rates, [float(OPTIMIZER.learning_rate(k)) for k in range(3)], rtol=1e-6)
    assert rates[0] < rates[1]


def test_gradients_are_clipped_by_their_global_norm(params, batches):
    state, metrics = update_step()(new_state(params), batches[0])
    assert float(metrics["grad_norm"]) > 0.1, "the metric is the norm before clipping"
    first_moment = jax.tree.leaves(state.opt_state[0].mu)
    norm = np.sqrt(sum(float(jnp.sum(leaf**2)) for leaf in first_moment))
    assert norm == pytest.approx(0.1 * (1 - 0.9), rel=1e-5)


def test_the_state_is_consumed_and_its_memory_used_again(params, batches):
    state = new_state(params)
    lowered = update_step().lower(state, batches[0]).compile()
    size = sum(leaf.nbytes for leaf in jax.tree.leaves(state))
    assert lowered.memory_analysis().alias_size_in_bytes >= size
    update_step()(state, batches[0])
    assert all(leaf.is_deleted() for leaf in jax.tree.leaves(state))
    assert not any(leaf.is_deleted() for leaf in jax.tree.leaves(params)), "the state owns copies"


def test_batches_of_one_bucket_compile_once(params, batches):
    state = new_state(params)
    score = make_score(CONFIG, make_mesh(), OPTIONS)
    for batch in [*batches, *batches]:
        batch = batch._replace(old_logprobs=score(state.params, batch)[0])
        state, _ = update_step()(state, batch)
        state, _ = update_step()(state, batch)
    assert score.compilations == update_step().compilations == 1


def test_in_the_first_pass_the_ratio_is_one(params, batches):
    batch = batches[0]._replace(old_logprobs=make_score(CONFIG, make_mesh(), OPTIONS)(params, batches[0])[0])
    _, metrics = update_step()(new_state(params), batch)
    assert float(metrics["ratio_deviation_max"]) <= 1e-5
    assert float(metrics["clip_frac"]) == 0.0


def test_parameters_that_are_not_fp32_are_refused(params):
    half = {**params, "head": {"weight": params["head"]["weight"].astype(jnp.bfloat16)}}
    with pytest.raises(ValueError, match="parameter head/weight is bfloat16; training needs float32 masters"):
        new_state(half)


def test_reinforce_with_advantage_one_learns_the_text_by_heart_in_bf16_on_fp32_masters(params, batches):
    optimizer = make_optimizer(OptimizerConfig(1e-2))
    options = ForwardOptions(jnp.bfloat16, banned=BANNED)
    step = make_update_step(CONFIG, ObjectiveSpec("reinforce"), optimizer, make_mesh(), options, known=())
    batch = batches[0]._replace(advantages=np.ones(SHAPE, np.float32))
    state, losses = init_state(params, optimizer, make_mesh(), CONFIG), []
    for _ in range(60):
        state, metrics = step(state, batch)
        losses.append(float(metrics["loss"]))
    assert losses[-1] < 0.5 * losses[0]
    assert {str(leaf.dtype) for leaf in jax.tree.leaves(state)} == {"float32", "int32"}
    assert {str(value.dtype) for value in metrics.values()} == {"float32"}
