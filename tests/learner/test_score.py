"""Log-probs of a packed batch against plain softmax over the logits, and their independence of neighbours."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
import pytest

from hermes_jax.data.buckets import Buckets
from hermes_jax.data.packing import pack
from hermes_jax.learner.mesh import make_mesh
from hermes_jax.learner.score import make_score
from hermes_jax.models.head import logits
from hermes_jax.models.transformer import forward, head_weight
from tests.learner.tiny import BANNED, OPTIONS, tiny_config, tiny_params, tiny_sequences

CONFIG = tiny_config()


@pytest.fixture(scope="module")
def params():
    return tiny_params(CONFIG)


@pytest.fixture(scope="module")
def score():
    return make_score(CONFIG, make_mesh(), OPTIONS)


def test_logprobs_and_entropies_are_those_of_the_masked_softmax_at_the_sampling_temperature(params, score):
    sequences = tiny_sequences(8)
    batch, layout = pack(sequences, Buckets(((2, 4, 64),)))
    logprobs, entropy = (layout.gather(x) for x in score(params, batch))
    for number in (1, 4, 7):
        sequence, got, got_entropy = sequences[number], logprobs[number], entropy[number]
        tokens = sequence.trajectory.tokens
        hidden, _ = forward(params, CONFIG, tokens[None], jnp.arange(len(tokens))[None])
        z = (
            np.asarray(logits(hidden, head_weight(params)), np.float64)[0, :-1]
            / sequence.trajectory.temperature[1:, None]
        )
        p = np.where(BANNED, 0.0, np.exp(z - z.max(-1, keepdims=True)))
        p /= p.sum(-1, keepdims=True)
        want = np.log(p[np.arange(len(p)), tokens[1:]])
        kept = sequence.loss_mask
        np.testing.assert_allclose(got[kept], want[kept[1:]], atol=2e-5)
        want_entropy = -np.sum(p * np.log(np.where(p > 0, p, 1.0)), axis=-1)
        np.testing.assert_allclose(got_entropy[kept], want_entropy[kept[1:]], atol=2e-5)
        assert not got[~kept].any()
        assert not got_entropy[~kept].any()


def test_a_segment_does_not_see_its_neighbours(params, score):
    batch, layout = pack(tiny_sequences(8), Buckets(((1, 4, 96),)))
    assert batch.segment_ids.max() >= 2
    before = layout.gather(score(params, batch)[0])
    changed = 3
    tokens = batch.tokens.copy().reshape(-1)
    cells = np.split(layout.cells(), np.cumsum(layout.length)[:-1])[changed]
    tokens[cells] = (tokens[cells] + 7) % 60
    after = layout.gather(score(params, batch._replace(tokens=tokens.reshape(layout.shape)))[0])
    for number, (old, new) in enumerate(zip(before, after, strict=True)):
        assert np.array_equal(old, new) == (number != changed) or not old.any()
