"""Plays conversations on the embedded engine and scores the same tokens as the learner does: packed, no cache."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from hermes_jax.data.buckets import Buckets
from hermes_jax.data.packing import TrainingSequence, pack
from hermes_jax.data.trajectory import Trajectory
from hermes_jax.engines.base import Completion, Sampling
from hermes_jax.engines.device import DeviceThread
from hermes_jax.engines.jax_engine import JaxEngine
from hermes_jax.learner.logprobs import ForwardOptions
from hermes_jax.learner.mesh import make_mesh
from hermes_jax.learner.score import Score, make_score
from hermes_jax.models.config import ModelConfig
from hermes_jax.models.transformer import Params
from tests.engines.tiny import fill_cache, make_engine, tiny_config, tiny_params

Ids = tuple[int, ...]
MEAN_LIMIT, MAX_LIMIT = 1e-4, 2e-3  # nats


@dataclass
class Bench:
    """An engine and all that is needed to score what it says.

    Args:
        weights: two sets of parameters: of the versions 0, 2, 4, ... and of 1, 3, 5, ...
        text: many ids that prompts are cut from.
    """

    engine: JaxEngine
    config: ModelConfig
    weights: Mapping[int, Params]
    text: Ids
    banned: np.ndarray
    width: int
    temperature: float = 1.0
    sound_scorer: Score | None = None

    @property
    def version(self) -> int:
        """Of the engine's weights; the engine is shared by copies of this object."""
        return self.engine._version

    def prompt(self, number: int, length: int) -> Ids:
        """Cuts a prompt of exactly `length` ids; other numbers, other prompts."""
        start = 17 * number % (len(self.text) - length)
        return self.text[start : start + length]

    async def publish(self, which: int) -> None:
        """Gives the engine one of the two sets of parameters, under the next version that belongs to it."""
        version = self.version + (1 if (self.version + 1) % 2 == which else 2)
        await self.engine.publish(self.weights[which], version)

    def scorer(self) -> Score:
        """The learner's scoring function, compiled anew when it is first called."""
        return make_score(self.config, make_mesh(), ForwardOptions(banned=self.banned, head_chunk=64))

    def score(self, trajectories: Sequence[Trajectory], scorer: Score | None = None) -> list[np.ndarray]:
        """The learner's log-probs, each token under the version that sampled it; 0 where it was not sampled."""
        if scorer is None:
            scorer = self.sound_scorer = self.sound_scorer or self.scorer()
        total = [np.zeros(len(t), np.float32) for t in trajectories]
        for version in sorted({int(v) for t in trajectories for v in t.policy_version[t.mask]}):
            own = [TrainingSequence(t, loss_mask=t.mask & (t.policy_version == version)) for t in trajectories]
            batch, layout = pack(own, Buckets(((1, 4, 2 * self.width),)))
            logprobs, _ = scorer(self.weights[version % 2], batch)
            total = [a + b for a, b in zip(total, layout.gather(np.asarray(logprobs)), strict=True)]
        return total

    def run(self, scenario: Callable[[Bench], Any]) -> list[Trajectory]:
        """Plays a scenario from an untrusted cache and the first set of parameters."""

        async def play() -> list[Trajectory]:
            await self.publish(0)
            return [talk.trajectory() for talk in await scenario(self)]

        fill_cache(self.engine, 1e9)
        return asyncio.run(play())


@dataclass
class Conversation:
    """Ids so far, with what the engine said about those it sampled."""

    engine: JaxEngine
    tokens: list[int]
    session: Hashable | None = None
    temperature: float = 1.0
    sampled: list[tuple[int, Completion]] = field(default_factory=list)

    async def turn(self, seed: int, max_tokens: int = 9, stop_ids: Ids = ()) -> Completion:
        """One reply of the engine."""
        sampling = Sampling(max_tokens, temperature=self.temperature, seed=seed, stop_ids=stop_ids)
        reply = await self.engine.generate(tuple(self.tokens), sampling, session=self.session)
        self.sampled.append((len(self.tokens), reply))
        self.tokens += reply.token_ids
        return reply

    def trajectory(self) -> Trajectory:
        """The conversation as the trainer gets it."""
        size = len(self.tokens)
        mask, logprobs, temperature = np.zeros(size, bool), np.zeros(size), np.ones(size)
        version, turn = np.full(size, -1), np.full(size, -1)
        for number, (start, reply) in enumerate(self.sampled):
            part = slice(start, start + len(reply.token_ids))
            mask[part], logprobs[part], temperature[part] = True, reply.logprobs, self.temperature
            version[part], turn[part] = reply.versions, number
        return Trajectory(np.array(self.tokens), mask, logprobs, temperature, version, turn)


@contextmanager
def tiny_bench(temperature: float = 1.0, **changes: Any) -> Iterator[Bench]:
    """A bench around a tiny random model; `changes` are keys of its config.json."""
    config = tiny_config(**changes)
    weights = {0: tiny_params(config), 1: tiny_params(config, seed=1)}
    banned = np.arange(config.vocab_size) >= 57
    text = tuple(np.random.default_rng(0).integers(0, config.vocab_size, 300).tolist())
    with DeviceThread() as device:
        engine = make_engine(device, config, weights[0], banned=banned)
        yield Bench(engine, config, weights, text, banned, width=64, temperature=temperature)
        asyncio.run(engine.close())


def assert_parity(trajectories: Sequence[Trajectory], scored: Sequence[np.ndarray]) -> None:
    """Mean |difference| at most 1e-4 and none above 2e-3, over all sampled tokens."""
    pairs = list(zip(trajectories, scored, strict=True))
    delta = np.concatenate([np.abs(t.logprobs - s)[t.mask] for t, s in pairs])
    assert delta.size
    assert delta.mean() <= MEAN_LIMIT, f"mean |difference| {delta.mean():.2e} over {delta.size} tokens"
    assert delta.max() <= MAX_LIMIT, f"largest |difference| {delta.max():.2e} over {delta.size} tokens"
