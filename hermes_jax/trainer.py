"""The loop: collect, score, pack, update, publish, checkpoint, log. Nothing else is owned here."""

from __future__ import annotations

import asyncio
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax

from hermes_jax.assembly import (
    Phase,
    expected_sequences,
    grpo_phase,
    load_function,
    objective_lines,
    objective_spec,
    open_engine,
    open_mesh,
    open_policy,
    training_buckets,
)
from hermes_jax.assembly import warm_start_phase as make_warm_start
from hermes_jax.batches import Batches, has_kl_in_rewards, imitation_batch, kl_in_rewards, training_batches
from hermes_jax.config import Config, dump
from hermes_jax.data.packing import PackedBatch
from hermes_jax.data.trajectory import Episode, Group
from hermes_jax.engines.device import DeviceThread
from hermes_jax.engines.jax_engine import JaxEngine
from hermes_jax.episode_failures import FailureNotes, NothingPlayed, require_some
from hermes_jax.episode_metrics import step_rewards, train_metrics
from hermes_jax.evaluator import Evaluation, evaluate
from hermes_jax.known_errors import KNOWN_ERRORS, disk_errors_named
from hermes_jax.learner.checkpoint import CheckpointError
from hermes_jax.learner.signal import Signal
from hermes_jax.learning import Learning
from hermes_jax.models import save_model
from hermes_jax.playing import Stage, open_players, open_stage
from hermes_jax.refilling import Collected, refill, tasks_per_step
from hermes_jax.report import Report
from hermes_jax.rollout.collect import collect_groups
from hermes_jax.run_folder import RunFolder
from hermes_jax.run_log import RunLog
from hermes_jax.saving import NAMES, TRAIN, WARM_START, Saving
from hermes_jax.stopping import Stopped, StopSignal
from hermes_jax.telemetry.alarms import StepRewards, reward_alarms
from hermes_jax.telemetry.metrics import of_update
from hermes_jax.telemetry.stopwatch import Stopwatch
from hermes_jax.tools.worker import WorkerServer

RATIO_ALARM = 1e-5
"""Largest |ratio - 1| that the first pass of a step may show: the scorer and the update run the same forward."""
LOG_EVERY, LOG_AFTER_S = 25, 10.0
"""Updates of the warm start between two looks at their metrics, and seconds after which there is one anyway."""


class Trainer:
    """One run, from its first step or from its last checkpoint.

    Args:
        config: of the run.
        run: its folder, from `open_run_folder`.
        worker: started before jax was imported.
        resume: go on from the newest whole checkpoint.
        policy_loss: a loss per token in place of the one that `grpo.objective` names; see docs/losses.md.
    """

    def __init__(
        self,
        config: Config,
        run: RunFolder,
        worker: WorkerServer,
        *,
        resume: bool = False,
        policy_loss: Callable[..., Any] | None = None,
    ) -> None:
        self.config, self.run_folder, self.worker, self.resume = config, run, worker, resume
        self.policy_loss = policy_loss
        self.saving = Saving(config, run)
        self.stop = StopSignal(self.saving.how_to_go_on)
        self.phase: Phase | None = None
        self.engine: JaxEngine | None = None
        self.part, self.step = WARM_START, 0
        self.before: Mapping[str, float | None] | None = None
        self.evaluated: int | None = None
        self.after: Mapping[str, float | None] = {}
        self.rewards: list[StepRewards] = []
        self.failures = FailureNotes()

    async def run(self) -> Report:
        """Trains to `env.total_steps` and evaluates before and after.

        Raises:
            Stopped: a signal came; the run is saved and can be resumed.
            KNOWN_ERRORS: the same, if there was anything to save.
        """
        self.stop.install()
        try:
            with DeviceThread() as self.device:
                await self._open()
                try:
                    with disk_errors_named(self.run_folder.root):
                        await self._warm_start()
                        await self._train()
                        return await self._finish()
                except (Stopped, *KNOWN_ERRORS) as reason:
                    await self._save_and_say(reason)
                    raise
                finally:
                    await self._close()
        finally:
            self.stop.remove()

    # -- parts -----------------------------------------------------------------------------------------------------

    async def _open(self) -> None:
        """Makes the parts. Whatever can be found wrong is found before the run folder is touched."""
        config, run = self.config, self.run_folder
        self.spec = await self.device.submit(objective_spec, config, self.policy_loss)
        stage = await open_stage(config, self.worker)
        if config.model.builder is None:
            await self._open_policy(stage)
        else:
            load_function(config.model.builder, "model.builder")
        self._check_stop_before_start()
        with disk_errors_named(run.root):
            run.begin(dump(config), resume=self.resume)
            if config.model.builder is not None:
                await self._open_policy(stage)
        self.learning = Learning(config, self.policy, self.mesh)
        self.part = self.saving.part_to_resume()
        found = await self.device.submit(self.saving.latest_step, self.part) if self.resume else None
        self.log = RunLog(config, run, (self.part, -1 if found is None else found) if self.resume else None)
        self.log.start()
        for line in (f"run folder: {run.root}", *self.players.notes):
            self.log.progress.print(line)
        self._check_stop_before_start()

    def _check_stop_before_start(self) -> None:
        try:
            self.stop.check()
        except Stopped as stopped:
            print(f"{stopped}: stopped before the first step; {self.saving.how_to_go_on()}", file=sys.stderr)
            raise

    async def _open_policy(self, stage: Stage) -> None:
        self.policy = await asyncio.to_thread(open_policy, self.config, self.run_folder)
        self.players = await asyncio.to_thread(open_players, stage, self.policy)
        self.mesh = await self.device.submit(open_mesh, self.config, self.policy)

    async def _close(self) -> None:
        if self.engine is not None:
            await self.engine.close()
        try:
            await self.device.submit(self.saving.close)
        finally:
            self.log.close()

    # -- warm start ------------------------------------------------------------------------------------------------

    async def _warm_start(self) -> None:
        steps = self.config.warm_start.steps
        if self.part != WARM_START:
            return
        self.phase = await self.device.submit(make_warm_start, self.config, self.policy, self.mesh)
        self.step = await self._begin(self.phase, self.policy.folder)
        self.log.begin("warm start", steps, self.step)
        prepared = self._prepare_imitation(self.step)
        updates: list[tuple[int, Any, float]] = []
        began = time.monotonic()
        try:
            while self.step < steps:
                batch, padding = await prepared
                if self.step + 1 < steps:
                    prepared = self._prepare_imitation(self.step + 1)
                due = self.saving.is_due(self.step + 1, steps)
                with self.stop.waits_for(f"the update of {NAMES[WARM_START]} {self.step + 1}"):
                    await self.device.submit(self.saving.wait_for_arrays)
                    metrics = await self.device.submit(self.learning.imitate, self.phase, batch)
                    self.step += 1
                    updates.append((self.step, metrics, padding))
                    if len(updates) > 1:  # one update runs while the next is made ready; a signal waits for no more
                        await self.device.submit(jax.block_until_ready, updates[-2][1])
                    late = time.monotonic() - began > LOG_AFTER_S
                    if due or late or self.stop.came or self.step % LOG_EVERY == 0:
                        await self._log_imitation(updates, began)
                        updates, began = [], time.monotonic()
                if due:
                    await self._save()
                if not updates:
                    await self.device.submit(self.learning.check_skipped)
                self.stop.check()
        finally:
            prepared.cancel()
        await self.device.submit(self._export, self.run_folder.start)
        await self.device.submit(self.saving.wait)

    def _prepare_imitation(self, step: int) -> asyncio.Task[tuple[PackedBatch, float]]:
        """Plays and packs a step's scripted episodes beside the update of the step before."""
        return asyncio.create_task(asyncio.to_thread(self._imitation_batch, step))

    def _imitation_batch(self, step: int) -> tuple[PackedBatch, float]:
        episodes = self.players.demonstrations(step, self.config.warm_start.episodes_per_step)
        return imitation_batch(episodes, self.config, self.policy, self.mesh)

    async def _log_imitation(self, updates: list[tuple[int, Any, float]], began: float) -> None:
        rows = await self.device.submit(jax.device_get, [metrics for _, metrics, _ in updates])
        names = ("loss", "grad_norm", "learning_rate", "num_tokens", "entropy_mean", "update_skipped")
        seconds = (time.monotonic() - began) / len(updates)
        tokens = sum(float(row["num_tokens"]) for row in rows) / len(rows)
        for (step, _, padding), row in zip(updates, rows, strict=True):
            values = {f"warm_start/{name}": row[name] for name in names}
            speed = {"warm_start/trained_tokens_per_s": tokens / seconds, "warm_start/seconds": seconds}
            self.log.write(step, {**values, **speed, "warm_start/padding_share": padding}, phase=WARM_START)
        self.log.show(updates[-1][0])

    # -- GRPO ------------------------------------------------------------------------------------------------------

    async def _train(self) -> None:
        config, run = self.config, self.run_folder
        start = run.start if run.start.exists() else self.policy.folder
        self.part, self.learning.state = TRAIN, None  # what the warm start leaves is in the folder
        self.phase = await self.device.submit(grpo_phase, config, self.policy, self.mesh, self.spec)
        self.step = await self._begin(self.phase, start)
        self.learning.reference = await self.device.submit(self.learning.load, start)
        params = self.learning.state.params if self.learning.state else None
        self.engine = await asyncio.to_thread(open_engine, config, self.policy, params, self.device, self.step)
        await self.device.submit(self.log.measure_peak)
        shapes = training_buckets(config, self.policy, self.mesh, expected_sequences(config)).shapes
        if len(shapes) > 1 and self.step < config.env.total_steps:  # else the second one would come as a surprise
            await self.device.submit(self.learning.prepare, self.phase, shapes)
        for line in objective_lines(config, self.phase.spec):
            self.log.progress.print(line)
        if self.before is None:
            first = await self._evaluate()
            self.before = first.metrics if first else {}
        elif self._evaluation_is_due() and self.evaluated != self.step:
            await self._evaluate()  # the run was stopped during this one
        self.log.begin("train", config.env.total_steps, self.step)
        self.log.lag.take()  # what compiling held up is no step's
        while self.step < config.env.total_steps:
            await self._step()
            self.stop.check()
        await self.device.submit(self.saving.wait)

    async def _step(self) -> None:
        """One step: a collection, the passes over it, a publication."""
        config, seconds, began = self.config, Stopwatch(self.device.busy_s), time.monotonic()
        assert self.engine is not None
        engine_before = self.engine.metrics()
        with seconds("collect"):
            collected = await self._collect()
        groups = collected.groups
        with seconds("pack"):
            packed = await asyncio.to_thread(training_batches, groups, config, self.policy, self.mesh)
        with self.stop.waits_for(f"the update of step {self.step + 1}"):
            packed, updated = await self._learn(packed, groups, seconds)
            self.step += 1
        with seconds("publish"):
            assert self.learning.state is not None
            await self.engine.publish(self.learning.state.params, self.step)
        values = {
            **train_metrics(collected.played),
            **collected.metrics(),
            **packed.metrics,
            **of_update(updated),
            "policy_version": self.step - 1,
        }
        passes = config.grpo.iterations_per_batch
        values |= self.log.speeds(values, seconds, self.policy, collected.played, groups, passes)
        values |= self.log.engine_counters(engine_before, self.engine.metrics())
        self.log.write(self.step, values)  # before the checkpoint: a run that goes on from it has this row
        self._alarms(values, collected)
        await self._after_update(collected, packed.signal, seconds, began)
        await self.device.submit(self.learning.check_skipped)

    async def _learn(
        self, packed: Batches, groups: Sequence[Group], seconds: Stopwatch
    ) -> tuple[Batches, Mapping[str, float]]:
        """The passes over a step's batches: what was trained on, and the updates' metrics."""
        assert self.phase is not None
        if not packed.batches:
            return packed, {}
        with seconds("score"):
            scored = await self.device.submit(self.learning.score_batches, packed.batches)
        if has_kl_in_rewards(self.config):
            with seconds("pack"):
                packed, scored = await asyncio.to_thread(kl_in_rewards, packed, scored, groups, self.config)
        with seconds("checkpoint"):
            await self.device.submit(self.saving.wait_for_arrays)
        with seconds("update"):
            passes = self.config.grpo.iterations_per_batch
            return packed, await self.device.submit(self.learning.train, self.phase, scored, passes)

    async def _after_update(self, collected: Collected, signal: Signal, seconds: Stopwatch, began: float) -> None:
        """What a step does besides learning: its episodes, an evaluation, a checkpoint."""
        with seconds("episodes"):
            await self._save_episodes(self.step, collected.episodes, advantages=collected.advantages(signal))
        metric = None
        if self._evaluation_is_due():
            with seconds("evaluate"):
                evaluation = await self._evaluate()
            metric = evaluation.metrics.get(self.config.checkpoint.best_metric) if evaluation else None
        if self.saving.is_due(self.step, self.config.env.total_steps):
            with seconds("checkpoint"):
                await self._save(metric)
        taken = time.monotonic() - began
        later = {f"seconds/{name}": seconds.taken.get(name, 0.0) for name in ("episodes", "evaluate", "checkpoint")}
        self.log.write(self.step, {**later, "seconds/step": taken, "speed/steps_per_h": 3600 / taken})
        self.log.show(self.step)

    async def _collect(self) -> Collected:
        groups = await self._play(0, self.config.env.groups_per_step)
        return await refill(groups, self._play, self.config)

    async def _play(self, place: int, count: int) -> list[Group]:
        """Groups of the step's tasks from a place on: tasks are taken in order, each once."""
        config, step = self.config, self.step
        assert self.engine is not None
        first = step * tasks_per_step(config) + place
        items = [self.players.environment.train_item(n) for n in range(first, first + count)]
        collector = self.players.collector(self.engine, config.grpo.temperature)
        options = {"group_size": config.env.group_size, "seed": config.seed, "step": step, "first_place": place}
        groups = await self.stop.guard(collect_groups(collector, items, **options))
        await self._require_some(_episodes(groups), f"step {step + 1}", {"train": _episodes(groups)})
        return groups

    async def _require_some(self, episodes: Sequence[Episode], where: str, kinds: Mapping[str, Any]) -> None:
        """Says which failures are new; if nothing worked, saves the episodes and raises NothingPlayed."""
        for line in self.failures.new(episodes):
            self.log.progress.print(f"warning: {where}: {line}")
        try:
            require_some(episodes, where, rewards="train" in kinds)
        except NothingPlayed as error:
            for kind, played in kinds.items():
                await self._save_episodes(self.step + (kind == "train"), played, kind)
            raise NothingPlayed(
                f"{error}. What they did is in {self.run_folder.episodes}; mend the cause and go on with --resume"
            ) from error

    def _alarms(self, values: Mapping[str, float | None], collected: Collected) -> None:
        self.rewards.append(step_rewards(collected.played, collected.signal.groups_constant))
        for line in reward_alarms(self.rewards):
            self.log.progress.print(f"warning: {line}")
        deviation = values.get("update/first_pass_ratio_deviation") or 0.0
        if deviation > RATIO_ALARM:
            self.log.progress.print(
                f"warning: step {self.step}: before the first update the ratio already differs from 1 by "
                f"{deviation:.1e} (limit {RATIO_ALARM:.0e}): scorer and update disagree"
            )

    # -- evaluation, saving, ending --------------------------------------------------------------------------------

    def _evaluation_is_due(self) -> bool:
        """After the last step, and every `env.steps_per_eval` steps before it."""
        every, last = self.config.env.steps_per_eval, self.step == self.config.env.total_steps
        return self.step > 0 and (last or (bool(every) and self.step % every == 0))

    async def _evaluate(self) -> Evaluation | None:
        assert self.engine is not None
        self.log.progress.note("evaluating on held-out tasks")
        evaluation = await self.stop.guard(evaluate(self.players, self.engine))
        if evaluation is None:
            return None
        kinds = {"eval_sampled": evaluation.sampled, "eval_greedy": evaluation.greedy}
        played = [*evaluation.sampled, *evaluation.greedy]
        await self._require_some(played, f"the evaluation at step {self.step}", kinds)
        self.log.write(self.step, evaluation.metrics)
        for kind, episodes in kinds.items():
            await self._save_episodes(self.step, episodes, kind)
        self.evaluated, self.after = self.step, evaluation.metrics
        return evaluation

    async def _save_episodes(
        self, step: int, episodes: Sequence[Episode], kind: str = "train", advantages: Sequence[float] | None = None
    ) -> None:
        if self.config.logging.save_episodes:
            await asyncio.to_thread(self.log.episodes.write, step, episodes, kind=kind, advantages=advantages)

    async def _begin(self, phase: Phase, folder: Path) -> int:
        """State of a part from its newest whole checkpoint when resuming, else from a model folder; its step."""
        found = await self.device.submit(self.saving.latest_step, self.part) if self.resume else None
        for line in self.saving.problems(self.part) if self.resume else ():
            self.log.progress.print(f"warning: {line}")
        if found is None:
            params = await self.device.submit(self.learning.load, folder)
            await self.device.submit(self.learning.begin, phase, params)
            return 0
        abstract = await self.device.submit(self.learning.abstract, phase.optimizer)
        restored = await self.device.submit(self.saving.restore, self.part, abstract, found)
        self.learning.state = restored.state
        self.before, self.evaluated = restored.host["before"], restored.host["evaluated"]
        self.after = restored.host["after"]
        self.rewards = [StepRewards(**row) for row in restored.host["rewards"]]
        self.log.progress.print(f"resumed from the checkpoint of {NAMES[self.part]} {found}")
        return int(restored.step)

    async def _save(self, metric: float | None = None) -> None:
        assert self.learning.state is not None
        with self.stop.waits_for("the checkpoint"):
            await self.device.submit(
                self.saving.save, self.part, self.step, self.learning.state, self._host_state(), metric
            )

    def _host_state(self) -> dict[str, Any]:
        return {
            "step": self.step,
            "cursor": self.step * tasks_per_step(self.config),
            "policy_version": self.step,
            "config": dump(self.config),
            "before": self.before,
            "evaluated": self.evaluated,
            "after": self.after,
            "rewards": [vars(row) | {"failures": dict(row.failures)} for row in self.rewards[-20:]],
        }

    async def _save_and_say(self, reason: BaseException) -> None:
        """Saves the step that was reached, unless it is saved already; one clear line."""
        await self.device.submit(lambda: None)  # what the device is doing ends first
        state = self.learning.state
        if state is not None and not isinstance(reason, CheckpointError):
            with self.stop.waits_for("the checkpoint"):
                await self.device.submit(self.saving.save_last, self.part, self.step, state, self._host_state())
        self.log.progress.close()
        prefix = f"{reason}: " if isinstance(reason, Stopped) else ""
        print(prefix + self.saving.how_to_go_on(), file=sys.stderr, flush=True)

    def _export(self, to: Path) -> None:
        assert self.learning.state is not None
        save_model(self.learning.state.params, self.policy.config, self.policy.folder, to, dtype="float32")

    async def _finish(self) -> Report:
        self.log.progress.note("exporting")
        await self.device.submit(self._export, self.run_folder.final)
        if self.evaluated != self.step:
            await self._evaluate()
        report = Report(self.run_folder, self.step, self.before or {}, self.after)
        report.save()
        self.log.progress.close()
        return report


def _episodes(groups: Sequence[Group]) -> list[Episode]:
    return [episode for group in groups for episode in group.episodes]
