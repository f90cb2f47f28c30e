"""The loop: collect, score, pack, update, publish, checkpoint, log. Nothing else is owned here."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import jax

from hermes_jax.assembly import Phase, grpo_phase, open_engine, open_mesh, open_policy, packing_buckets
from hermes_jax.assembly import warm_start_phase as make_warm_start
from hermes_jax.config import Config, dump
from hermes_jax.data.packing import PackedBatch, pack, pack_parts, split_by_group
from hermes_jax.data.trajectory import Group, Outcome
from hermes_jax.engines.device import DeviceThread
from hermes_jax.engines.jax_engine import JaxEngine
from hermes_jax.episode_metrics import step_rewards, train_metrics
from hermes_jax.evaluator import Evaluation, evaluate
from hermes_jax.learner.checkpoint import Checkpoints
from hermes_jax.learner.signal import Signal, imitation_signal, make_signal
from hermes_jax.learning import Learning
from hermes_jax.models import save_model
from hermes_jax.playing import Players, open_players
from hermes_jax.report import Report
from hermes_jax.rollout.collect import collect_groups
from hermes_jax.run_folder import RunFolder
from hermes_jax.run_log import RunLog
from hermes_jax.stopping import Stopped, StopSignal
from hermes_jax.telemetry.alarms import StepRewards, reward_alarms
from hermes_jax.telemetry.metrics import of_update
from hermes_jax.tools.worker import WorkerServer

RATIO_ALARM = 1e-5
"""Largest |ratio - 1| that the first pass of a step may show: the scorer and the update run the same forward."""


class Trainer:
    """One run, from its first step or from its last checkpoint.

    Args:
        config: of the run.
        run: its folder, from `open_run_folder`.
        worker: started before jax was imported.
        resume: go on from the newest whole checkpoint.
    """

    def __init__(self, config: Config, run: RunFolder, worker: WorkerServer, *, resume: bool = False) -> None:
        self.config, self.run_folder, self.worker, self.resume = config, run, worker, resume
        self.stop = StopSignal()
        self.step = 0
        self.before: Mapping[str, float | None] | None = None
        self.rewards: list[StepRewards] = []

    async def run(self) -> Report:
        """Trains to `env.total_steps` and evaluates before and after.

        Raises:
            Stopped: a signal came; the run is saved and can be resumed.
        """
        if not self.resume:
            self.run_folder.config.write_text(dump(self.config))
        with DeviceThread() as device:
            self.device = device
            await self._open()
            self.stop.install()
            try:
                await self._warm_start()
                await self._train()
                return await self._finish()
            except Stopped as stopped:
                await self._save_and_say(stopped)
                raise
            finally:
                await self._close()

    # -- parts -----------------------------------------------------------------------------------------------------

    async def _open(self) -> None:
        config, run = self.config, self.run_folder
        self.policy = open_policy(config, run)
        self.players: Players = open_players(config, self.policy, self.worker)
        self.mesh = await self.device.submit(open_mesh, config)
        self.learning = Learning(config, self.policy, self.mesh)
        self.phase: Phase | None = None
        self.engine: JaxEngine | None = None
        checkpoint = config.checkpoint
        kept, later = checkpoint.keep_last, checkpoint.asynchronous
        self.warm_checkpoints = Checkpoints(run.warm_checkpoints, keep_last=kept, asynchronous=later)
        self.checkpoints = Checkpoints(
            run.checkpoints, keep_last=kept, keep_best=checkpoint.keep_best, asynchronous=later
        )
        warm = config.warm_start.steps > 0 and not run.start.exists()
        found = (self.warm_checkpoints if warm else self.checkpoints).latest_step() if self.resume else None
        self.log = RunLog(config, run, ("warm_start" if warm else "train", found or 0) if self.resume else None)
        self.log.start()

    async def _close(self) -> None:
        if self.engine is not None:
            await self.engine.close()
        for checkpoints in (self.warm_checkpoints, self.checkpoints):
            await self.device.submit(checkpoints.close)
        self.log.close()

    # -- warm start ------------------------------------------------------------------------------------------------

    async def _warm_start(self) -> None:
        steps = self.config.warm_start.steps
        if steps == 0 or self.run_folder.start.exists():
            return
        self.phase = make_warm_start(self.config, self.policy, self.mesh)
        self.step = await self._begin(self.phase, self.warm_checkpoints, self.policy.folder)
        self.log.progress.start("warm start", steps, self.step)
        prepared = asyncio.create_task(asyncio.to_thread(self._imitation_batch, self.step))
        pending: list[tuple[int, Any, float]] = []
        began = time.monotonic()
        while self.step < steps:
            batch, padding = await prepared
            if self.step + 1 < steps:
                prepared = asyncio.create_task(asyncio.to_thread(self._imitation_batch, self.step + 1))
            metrics = await self.device.submit(self.learning.imitate, self.phase, batch)
            self.step += 1
            pending.append((self.step, metrics, padding))
            if self.step % 25 == 0 or self.step == steps:
                await self._log_imitation(pending, began)
                pending, began = [], time.monotonic()
            await self._save_if_due(self.warm_checkpoints, steps)
            self.stop.check()
        await self.device.submit(self._export, self.run_folder.start)
        await self.device.submit(self.warm_checkpoints.wait)

    def _imitation_batch(self, step: int) -> tuple[PackedBatch, float]:
        count = self.config.warm_start.episodes_per_step
        sequences = imitation_signal(self.players.demonstrations(step, count))
        if not sequences:
            raise ValueError(
                f"warm_start.steps is {self.config.warm_start.steps}, but environment {self.config.env.name} has no "
                "scripted episodes (Environment.demonstrate); set warm_start.steps to 0"
            )
        buckets = packing_buckets(self.config, self.policy, self.mesh, len(sequences))
        batch, layout = pack(sequences, buckets)
        return batch, layout.padding_share

    async def _log_imitation(self, pending: list[tuple[int, Any, float]], began: float) -> None:
        rows = await self.device.submit(jax.device_get, [metrics for _, metrics, _ in pending])
        await self.device.submit(self.learning.check_skipped, rows[-1])
        names = ("loss", "grad_norm", "learning_rate", "num_tokens", "entropy_mean", "update_skipped")
        seconds = (time.monotonic() - began) / len(pending)
        tokens = sum(float(row["num_tokens"]) for row in rows) / len(rows)
        for (step, _, padding), row in zip(pending, rows, strict=True):
            values = {f"warm_start/{name}": row[name] for name in names}
            speed = {"warm_start/trained_tokens_per_s": tokens / seconds, "warm_start/seconds": seconds}
            self.log.write(step, {**values, **speed, "warm_start/padding_share": padding}, phase="warm_start")
        self.log.show(pending[-1][0])

    # -- GRPO ------------------------------------------------------------------------------------------------------

    async def _train(self) -> None:
        config, run = self.config, self.run_folder
        start = run.start if run.start.exists() else self.policy.folder
        self.phase = grpo_phase(config, self.policy, self.mesh)
        self.step = await self._begin(self.phase, self.checkpoints, start)
        self.learning.reference = await self.device.submit(self.learning.load, start)
        params = self.learning.state.params if self.learning.state else None
        self.engine = await asyncio.to_thread(open_engine, config, self.policy, params, self.device, self.step)
        for line in (f"objective: {self.phase.spec.formula()}", *self.phase.spec.warnings()):
            self.log.progress.print(line)
        if self.before is None:
            first = await self._evaluate(self.step)
            self.before = first.metrics if first else {}
        self.log.progress.start("train", config.env.total_steps, self.step)
        while self.step < config.env.total_steps:
            await self._step()
            self.stop.check()
        await self.device.submit(self.checkpoints.wait)

    async def _step(self) -> None:
        """One step: a collection, the passes over it, a publication."""
        config, seconds, began = self.config, _Stopwatch(), time.monotonic()
        assert self.engine is not None
        assert self.phase is not None
        engine_before = self.engine.metrics()
        items = [self.players.environment.train_item(n) for n in range(*self._items(self.step))]
        collector = self.players.collector(self.engine, config.grpo.temperature)
        with seconds("collect"):
            work = collect_groups(collector, items, group_size=config.env.group_size, seed=config.seed, step=self.step)
            groups = await self.stop.guard(work)
        with seconds("pack"):
            signal, batches, packing = await asyncio.to_thread(self._pack, groups)
        updated: Mapping[str, float] = {}
        if batches:
            with seconds("score"):
                scored = await self.device.submit(self.learning.score_batches, batches)
            with seconds("update"):
                passes = config.grpo.iterations_per_batch
                updated = await self.device.submit(self.learning.train, self.phase, scored, passes)
        with seconds("publish"):
            assert self.learning.state is not None
            await self.engine.publish(self.learning.state.params, self.step + 1)
        self.step += 1
        values = {
            **train_metrics(groups),
            "groups/count": len(groups),
            "groups/constant": signal.groups_constant / len(groups),
            "groups/too_few": signal.groups_too_few / len(groups),
            **packing,
            **of_update(updated),
            "policy_version": self.step - 1,
        }
        values |= self.log.speeds(values, seconds.taken, self.policy, groups, config.grpo.iterations_per_batch)
        values |= self.log.engine_counters(engine_before, self.engine.metrics())
        await self._after_step(values, groups, signal, began)

    async def _after_step(
        self, values: dict[str, float | None], groups: list[Group], signal: Signal, began: float
    ) -> None:
        config = self.config
        if config.logging.save_episodes:
            episodes = [episode for group in groups for episode in group.episodes]
            await asyncio.to_thread(self.log.episodes.write, self.step, episodes)
        due = config.env.steps_per_eval and self.step % config.env.steps_per_eval == 0
        evaluation = await self._evaluate(self.step) if due and self.step < config.env.total_steps else None
        saving = time.monotonic()
        metric = evaluation.metrics.get(config.checkpoint.best_metric) if evaluation else None
        await self._save_if_due(self.checkpoints, config.env.total_steps, metric)
        values["seconds/checkpoint"] = time.monotonic() - saving
        values["seconds/step"] = time.monotonic() - began
        values["speed/steps_per_h"] = 3600 / (time.monotonic() - began)
        self.log.write(self.step, values)
        self.log.show(self.step)
        self._alarms(values, groups, signal)

    def _items(self, step: int) -> tuple[int, int]:
        """The prompt cursor before and after a step: tasks are taken in order, each once."""
        return step * self.config.env.groups_per_step, (step + 1) * self.config.env.groups_per_step

    def _pack(self, groups: list[Group]) -> tuple[Signal, list[PackedBatch], dict[str, float]]:
        grpo = self.config.grpo
        signal = make_signal(
            groups,
            method=grpo.advantage,
            outcome_policy={outcome: getattr(grpo.outcome_policy, outcome) for outcome in Outcome},
            penalised_reward=grpo.penalised_reward,
        )
        sequences = signal.sequences
        if not sequences:
            return signal, [], {"batch/trained_tokens": 0}
        parts = split_by_group(sequences, min(grpo.mini_batches, len({s.group for s in sequences})))
        limit = self.config.env.group_size * -(-self.config.env.groups_per_step // grpo.mini_batches)
        buckets = packing_buckets(self.config, self.policy, self.mesh, max(limit, *(len(part) for part in parts)))
        packed = pack_parts([[sequences[n] for n in part] for part in parts], buckets)
        trained = sum(int(batch.loss_mask.sum()) for batch, _ in packed)
        tokens = sum(int(layout.length.sum()) for _, layout in packed)
        padding = sum(layout.padding_share for _, layout in packed) / len(packed)
        numbers = {"batch/padding_share": padding, "batch/tokens": tokens, "batch/trained_tokens": trained}
        return signal, [batch for batch, _ in packed], numbers

    def _alarms(self, values: Mapping[str, float | None], groups: list[Group], signal: Signal) -> None:
        self.rewards.append(step_rewards(groups, signal.groups_constant))
        for line in reward_alarms(self.rewards):
            self.log.progress.print(f"warning: {line}")
        deviation = values.get("update/first_pass_ratio_deviation") or 0.0
        if deviation > RATIO_ALARM:
            self.log.progress.print(
                f"warning: step {self.step}: before the first update the ratio already differs from 1 by "
                f"{deviation:.1e} (limit {RATIO_ALARM:.0e}): scorer and update disagree"
            )

    # -- evaluation, saving, ending --------------------------------------------------------------------------------

    async def _evaluate(self, step: int) -> Evaluation | None:
        assert self.engine is not None
        self.log.progress.note("evaluating on held-out tasks")
        evaluation = await self.stop.guard(evaluate(self.players, self.engine))
        if evaluation is None:
            return None
        self.log.write(step, evaluation.metrics)
        if self.config.logging.save_episodes:
            await asyncio.to_thread(self.log.episodes.write, step, evaluation.sampled, kind="eval_sampled")
            await asyncio.to_thread(self.log.episodes.write, step, evaluation.greedy, kind="eval_greedy")
        return evaluation

    async def _begin(self, phase: Phase, checkpoints: Checkpoints, folder: Path) -> int:
        """State of a phase from its newest whole checkpoint when resuming, else from a model folder; its step."""
        found = await self.device.submit(checkpoints.latest_step) if self.resume else None
        for line in checkpoints.report() if self.resume else ():
            self.log.progress.print(f"warning: {line}")
        if found is None:
            params = await self.device.submit(self.learning.load, folder)
            await self.device.submit(self.learning.begin, phase, params)
            return 0
        restored = await self.device.submit(checkpoints.restore, self.learning.abstract(phase), found)
        self.learning.state = restored.state
        self.before = restored.host["before"]
        self.rewards = [StepRewards(**row) for row in restored.host["rewards"]]
        await self.device.submit(checkpoints.discard_after, found)
        self.log.progress.print(f"resumed from the checkpoint of step {found}")
        return int(restored.step)

    async def _save_if_due(self, checkpoints: Checkpoints, total: int, metric: float | None = None) -> None:
        every = self.config.checkpoint.every_steps
        if (every and self.step % every == 0) or self.step == total:
            await self.device.submit(self._save, checkpoints, metric)

    def _save(self, checkpoints: Checkpoints, metric: float | None = None) -> None:
        host = {
            "step": self.step,
            "cursor": self._items(self.step)[0],
            "policy_version": self.step,
            "config": dump(self.config),
            "before": self.before,
            "rewards": [vars(row) | {"failures": dict(row.failures)} for row in self.rewards[-20:]],
        }
        checkpoints.save(self.step, self.learning.state, host, metric=metric)

    async def _save_and_say(self, stopped: Stopped) -> None:
        """Saves the step that was reached, unless it is saved already; one clear line."""
        if self.learning.state is None or self.phase is None:
            self.log.progress.print(f"{stopped}: stopped before the first step; nothing to save")
            return
        checkpoints = self.checkpoints if self.engine is not None else self.warm_checkpoints
        if await self.device.submit(checkpoints.latest_step) != self.step:
            await self.device.submit(self._save, checkpoints)
        await self.device.submit(checkpoints.wait)
        self.log.progress.close()
        name = "step" if checkpoints is self.checkpoints else "warm-start step"
        self.log.progress.print(
            f"{stopped}: saved at {name} {self.step}. Go on with: "
            f"python -m hermes_jax.train --resume {self.run_folder.root}"
        )

    def _export(self, to: Path) -> None:
        assert self.learning.state is not None
        save_model(self.learning.state.params, self.policy.config, self.policy.folder, to, dtype="float32")

    async def _finish(self) -> Report:
        self.log.progress.note("exporting")
        await self.device.submit(self._export, self.run_folder.final)
        after = await self._evaluate(self.step)
        report = Report(self.run_folder, self.before or {}, after.metrics if after else {})
        report.save()
        self.log.progress.close()
        return report


class _Stopwatch:
    """Seconds by phase of a step."""

    def __init__(self) -> None:
        self.taken: dict[str, float] = {}

    @contextmanager
    def __call__(self, phase: str) -> Iterator[None]:
        start = time.monotonic()
        yield
        self.taken[phase] = self.taken.get(phase, 0.0) + time.monotonic() - start
