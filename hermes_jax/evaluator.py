"""Success on held-out tasks, sampled and greedy."""

from __future__ import annotations

import time
from dataclasses import dataclass

from hermes_jax.data.trajectory import Episode
from hermes_jax.engines.base import TokenEngine
from hermes_jax.episode_metrics import eval_metrics
from hermes_jax.playing import Players
from hermes_jax.rollout.collect import collect_groups
from hermes_jax.rollout.environment import call

EVAL_SEED = 0x5EED
"""Folded into the run's seed, so that evaluations share no random number with training, and each uses the same ones."""


@dataclass(frozen=True, eq=False)
class Evaluation:
    """Numbers under their documented names, and the episodes behind them."""

    metrics: dict[str, float | None]
    sampled: list[Episode]
    greedy: list[Episode]


async def evaluate(players: Players, engine: TokenEngine) -> Evaluation | None:
    """Plays `env.eval_episodes` held-out tasks twice: at `env.agent_temperature`, and greedily.

    None if the config or the environment has no held-out tasks.
    """
    items = list(await call(players.environment.eval_items))[: players.config.env.eval_episodes]
    if not items:
        return None
    start = time.monotonic()
    played = []
    for temperature in (players.config.env.agent_temperature, 0.0):
        collector = players.collector(engine, temperature)
        groups = await collect_groups(collector, items, group_size=1, seed=players.config.seed, step=-EVAL_SEED)
        played.append([episode for group in groups for episode in group.episodes])
    sampled, greedy = played
    return Evaluation(eval_metrics(sampled, greedy, time.monotonic() - start), sampled, greedy)
