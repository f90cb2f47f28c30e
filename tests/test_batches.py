"""From episodes to packed batches: the KL in the rewards."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from hermes_jax import config as cfg
from hermes_jax.batches import kl_in_rewards, training_batches
from hermes_jax.data.trajectory import Group, Outcome
from hermes_jax.learner.mesh import make_mesh
from tests.learner.test_signal import episode
from tests.learner.tiny import tiny_config

BETA = 0.5


class Model:
    config = tiny_config()


def group(task: str, *rewards: float | None) -> Group:
    """Episodes of two trajectories, of which the first ran out of time."""
    episodes = [episode(member, reward, sampled=3 + member) for member, reward in enumerate(rewards)]
    episodes = [replace(one, trajectories=one.trajectories * 2) for one in episodes]
    episodes[0] = replace(episodes[0], outcome=Outcome.TIMEOUT)  # masked: in the statistics, not in the loss
    return Group(task, tuple(episodes))


@pytest.mark.parametrize("kind", ["k1", "k3"])
def test_advantages_are_those_of_the_rewards_less_the_kl(kind):
    groups = [group("a", 1.0, 0.0, 3.0), group("b", 2.0, 2.0, None), group("c", 0.0, 1.0, 1.0)]
    options = [f"grpo.beta={BETA}", "grpo.kl_in=reward", f"grpo.kl_kind={kind}", "grpo.advantage=leave_one_out"]
    config = cfg.load(overrides=[*options, "grpo.mini_batches=2", "env.max_token_length=16", "model.context_length=32"])
    packed = training_batches(groups, config, Model, make_mesh())
    rng = np.random.default_rng(0)
    scored = [
        batch._replace(
            old_logprobs=np.where(batch.loss_mask, rng.normal(-1, 0.3, batch.tokens.shape), np.nan),
            ref_logprobs=np.where(batch.loss_mask, rng.normal(-1, 0.3, batch.tokens.shape), np.nan),
        )
        for batch in packed.batches
    ]
    after, batches = kl_in_rewards(packed, scored, groups, config)

    penalty = {}  # by plain loops over the cells of the packed batches
    sizes = {}
    for (part, layout), batch in zip(packed.parts, scored, strict=True):
        for number, row, start, length in zip(part, layout.row, layout.offset, layout.length, strict=True):
            mask, old, ref = (
                array.reshape(-1, layout.shape[2])[row]
                for array in (batch.loss_mask, batch.old_logprobs, batch.ref_logprobs)
            )
            at = packed.signal.episode_of[number]
            for cell in range(start, start + length):
                if mask[cell]:
                    d = float(old[cell] - ref[cell])
                    penalty[at] = penalty.get(at, 0.0) + {"k1": d, "k3": np.exp(-d) - 1 + d}[kind]
                    sizes[at] = sizes.get(at, 0) + 1
    rewards = [one.reward for g in groups for one in g.episodes]
    assert sizes == {n: 2 * (3 + n % 3) for n, reward in enumerate(rewards) if reward is not None}
    for start in (0, 3, 6):
        members = [n for n in range(start, start + 3) if rewards[n] is not None]
        shaped = {n: rewards[n] - BETA * penalty[n] for n in members}
        for n in members:
            others = [shaped[m] for m in members if m != n]
            assert after.signal.advantages[n] == pytest.approx(shaped[n] - np.mean(others), abs=1e-6)
    assert after.metrics["train/kl_penalty"] == pytest.approx(BETA * np.mean(list(penalty.values())), abs=1e-6)
    assert (after.signal.groups_constant, after.signal.groups_too_few) == (1, 0), "said of the plain rewards"

    trained = 0
    for (part, layout), batch in zip(packed.parts, batches, strict=True):
        for number, values, mask in zip(
            part, layout.gather(batch.advantages), layout.gather(batch.loss_mask), strict=True
        ):
            at = packed.signal.episode_of[number]
            np.testing.assert_allclose(values, after.signal.advantages[at], rtol=1e-6)
            assert mask.sum() == (0 if at % 3 == 0 else 3 + at % 3), "masked episodes carry no loss"
            trained += mask.sum()
    assert after.metrics["batch/trained_tokens"] == trained


def test_gdpo_without_parts_names_the_environment_and_the_remedy():
    config = cfg.load(overrides=["grpo.advantage=gdpo"])
    with pytest.raises(cfg.ConfigError, match="gdpo, but no reward of environment terminal_test has named parts"):
        training_batches([group("a", 1.0, 0.0)], config, Model, make_mesh())
