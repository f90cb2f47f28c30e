"""One gradient, however the update is cut into micro-batches, packed, chunked or recomputed."""

from __future__ import annotations

from functools import cache

import jax
import numpy as np
import pytest

from hermes_jax.learner.logprobs import ForwardOptions
from hermes_jax.learner.mesh import make_mesh
from hermes_jax.learner.update import make_gradient
from hermes_jax.objectives.correction import Correction
from hermes_jax.objectives.spec import ObjectiveSpec
from tests.learner.tiny import BANNED, OPTIONS, Step, assert_same_gradient, tiny_config, tiny_params, tiny_sequences

SPECS = {
    "clip": ObjectiveSpec("clip", kl="k3", beta=0.1, entropy_coef=0.05),
    "gspo": ObjectiveSpec("gspo", clip_low=0.01, clip_high=0.01, aggregation="sequence_mean", kl="k2", beta=0.1),
    "cispo": ObjectiveSpec(
        "cispo",
        aggregation="constant",
        max_tokens=48,
        kl="k1",
        correction=Correction("sequence_truncate_geometric", max=1.1),
    ),
}
PADDED = ((1, 10, 48), True)
PACKED = ((5, 2, 64), False)
LAYOUTS = {
    "clip": (PADDED, ((1, 8, 64), False), PACKED),
    "gspo": (PADDED, PACKED),
    "cispo": (PADDED, PACKED),
}
KNOWN = ("old_logprobs", "ref_logprobs", "rollout_logprobs")


@pytest.fixture(scope="module")
def step():
    config = tiny_config()
    params = tiny_params(config)
    return config, params, Step(config, params, tiny_sequences())


@cache
def jitted_gradient(config, spec, options=OPTIONS, known=KNOWN):
    # Unoptimised code is the same mathematics and compiles in half the time.
    fast = {"xla_backend_optimization_level": 0}
    return jax.jit(make_gradient(config, spec, make_mesh(), options, known=known), compiler_options=fast)


@pytest.mark.parametrize("name", SPECS)
def test_packing_and_micro_batches_change_nothing(step, name):
    config, params, data = step
    gradient = jitted_gradient(config, SPECS[name])
    results = [gradient(params, data.batch(shape, one_per_row=alone)) for shape, alone in LAYOUTS[name]]
    (loss, want, metrics), *others = results
    assert 0 < float(metrics["clip_frac"]) < 1
    for other_loss, got, other_metrics in others:
        assert float(other_loss) == pytest.approx(float(loss), rel=1e-5, abs=1e-6)
        assert_same_gradient(got, want)
        assert metrics.keys() == other_metrics.keys()
        for key, value in metrics.items():
            assert float(other_metrics[key]) == pytest.approx(float(value), rel=1e-4, abs=1e-5), key


def test_chunks_and_recomputation_change_nothing(step):
    config, params, data = step
    options = ForwardOptions(banned=BANNED, head_chunk=37, remat=True)
    batch = data.batch(*PACKED[:1])
    want = jitted_gradient(config, SPECS["clip"])(params, batch)
    got = jitted_gradient(config, SPECS["clip"], options)(params, batch)
    assert_same_gradient(got[1], want[1])


def test_values_outside_the_loss_mask_have_no_influence(step):
    config, params, data = step
    batch = data.batch(*PACKED[:1])
    want = jitted_gradient(config, SPECS["clip"])(params, batch)
    garbage = {
        name: np.where(batch.loss_mask, getattr(batch, name), np.nan).astype(np.float32)
        for name in (*KNOWN, "advantages")
    }
    got = jitted_gradient(config, SPECS["clip"])(params, batch._replace(**garbage))
    assert_same_gradient(got[1], want[1], tolerance=0.0)


def test_nothing_to_train_is_a_zero_gradient(step):
    config, params, data = step
    batch = data.batch(*PACKED[:1])
    batch = batch._replace(loss_mask=np.zeros_like(batch.loss_mask))
    loss, gradient, metrics = jitted_gradient(config, SPECS["clip"])(params, batch)
    assert float(loss) == float(metrics["num_tokens"]) == 0.0
    assert all(not np.asarray(leaf).any() for leaf in jax.tree.leaves(gradient))


def test_counts_are_those_of_the_loss_mask(step):
    config, params, data = step
    batch = data.batch(*PACKED[:1])
    _, _, metrics = jitted_gradient(config, SPECS["clip"])(params, batch)
    assert int(metrics["num_tokens"]) == sum(int(s.loss_mask.sum()) for s in data.sequences)
    assert int(metrics["num_sequences"]) == len(data.sequences) - 1  # one trajectory trains nothing


def test_metrics_follow_what_is_known(step):
    config, params, data = step
    batch = data.batch(*PACKED[:1])
    _, _, metrics = jitted_gradient(config, SPECS["clip"])(params, batch)
    _, _, without = jitted_gradient(config, ObjectiveSpec(), known=())(params, batch)
    assert float(metrics["kl_ref_k3"]) > 0
    assert float(metrics["kl_ref_k1"]) != 0
    assert float(metrics["correction/logprob_diff_abs_max"]) > float(metrics["correction/logprob_diff_abs_mean"]) > 0
    assert not {"kl_ref_k1", "kl_ref_k3", "correction/logprob_diff_abs_mean"} & without.keys()
    assert float(without["ratio_deviation_max"]) == 0.0, "without old log-probs the present policy stands for the old"


def test_unknown_arrays_are_refused(step):
    with pytest.raises(ValueError, match="known may name old_logprobs, ref_logprobs, rollout_logprobs; not values"):
        make_gradient(step[0], ObjectiveSpec(), make_mesh(), OPTIONS, known=("values",))
