"""The learner of a run: its state on the devices, and the passes over a step's batches. Runs on the device thread."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh

from hermes_jax.assembly import Phase, Policy, forward_options
from hermes_jax.config import Config
from hermes_jax.data.buckets import Buckets, Shape
from hermes_jax.data.packing import PackedBatch, pack
from hermes_jax.learner.mesh import param_shardings
from hermes_jax.learner.optimizer import Optimizer
from hermes_jax.learner.score import make_score
from hermes_jax.learner.state import TrainState, abstract_state, init_state
from hermes_jax.models import abstract_params, load_model

_WORST = ("ratio_max", "ratio_deviation_max", "correction/logprob_diff_abs_max")
_SMALLEST = ("ratio_min",)


class TooManySkipped(RuntimeError):
    """So many updates in a row were not finite that the run is stopped."""


class Learning:
    """Parameters, optimizer state and reference of one run.

    Every method runs on the device thread; nothing outside holds the state's arrays.

    Args:
        config, policy, mesh: of the run.
    """

    def __init__(self, config: Config, policy: Policy, mesh: Mesh) -> None:
        self.config, self.policy, self.mesh = config, policy, mesh
        self.score = make_score(policy.config, mesh, forward_options(config, policy))
        self.state: TrainState | None = None
        self.reference: Any = None
        self._last: dict[str, Any] = {}

    def load(self, folder: Any) -> Any:
        """fp32 parameters of an HF folder, on the mesh."""
        shardings = param_shardings(abstract_params(self.policy.config), self.mesh, self.policy.config)
        return load_model(folder, shardings)[1]

    def begin(self, phase: Phase, params: Any) -> None:
        """A fresh optimizer for `params`, which are copied."""
        self.state = init_state(params, phase.optimizer, self.mesh, self.policy.config)

    def abstract(self, optimizer: Optimizer) -> TrainState:
        """What a checkpoint of a phase with this optimizer is restored into."""
        return abstract_state(abstract_params(self.policy.config), optimizer, self.mesh, self.policy.config)

    def score_batches(self, batches: Sequence[PackedBatch]) -> list[PackedBatch]:
        """The batches with log-probs of the present policy (`old`) and of the reference."""
        assert self.state is not None
        scored = []
        for batch in batches:
            old, _ = self.score(self.state.params, batch)
            ref, _ = self.score(self.reference, batch)
            scored.append(batch._replace(old_logprobs=np.asarray(old), ref_logprobs=np.asarray(ref)))
        return scored

    def prepare(self, phase: Phase, shapes: Sequence[Shape]) -> None:
        """Compiles score and update for every shape that a step's batches may have."""
        assert self.state is not None
        for shape in shapes:
            batch, _ = pack([], Buckets((shape,)))
            self.score.prepare(self.state.params, batch)
            phase.update_step.prepare(self.state, batch)

    def imitate(self, phase: Phase, batch: PackedBatch) -> Any:
        """One update; its metrics stay on the device."""
        assert self.state is not None
        self.state, metrics = phase.update_step(self.state, batch)
        self._last = metrics
        return metrics

    def train(self, phase: Phase, batches: Sequence[PackedBatch], passes: int) -> dict[str, float]:
        """`passes` times over all batches; one number per metric."""
        rows = [jax.device_get(self.imitate(phase, batch)) for _ in range(passes) for batch in batches]
        return merge_updates(rows) | self.counters()

    def counters(self) -> dict[str, float]:
        """Updates applied and skipped so far."""
        assert self.state is not None
        return {
            "count": int(self.state.update),
            "skipped_total": int(self.state.skipped),
            "skipped_in_a_row": int(self.state.skipped_in_a_row),
        }

    def check_skipped(self) -> None:
        """Looks at the updates so far.

        Raises:
            TooManySkipped: `grpo.max_skipped_steps` or more in a row were not finite.
        """
        assert self.state is not None
        skipped, limit = int(self.state.skipped_in_a_row), self.config.grpo.max_skipped_steps
        if skipped >= limit:
            raise TooManySkipped(
                f"{skipped} updates in a row had a loss or gradient that is not finite (the last one: loss "
                f"{float(self._last['loss'])}, gradient norm {float(self._last['grad_norm'])}); the parameters are "
                "those before them. To use them, write them out (python -m hermes_jax.export RUN --to DIR) and start a "
                "new run (model.path=DIR) with a lower learning rate or with grpo.log_ratio_clamp; "
                "grpo.max_skipped_steps sets this limit"
            )


def merge_updates(rows: Sequence[dict[str, Any]]) -> dict[str, float]:
    """The metrics of a step's updates as one row: worst values of extremes, the last learning rate, else the mean."""
    merged = {}
    for name in rows[0]:
        values = [float(row[name]) for row in rows]
        if name in _WORST:
            merged[name] = max(values)
        elif name in _SMALLEST:
            merged[name] = min(values)
        else:
            merged[name] = values[-1] if name == "learning_rate" else float(np.mean(values))
    if "ratio_deviation_max" in merged:
        merged["first_pass_ratio_deviation"] = float(rows[0]["ratio_deviation_max"])
    return merged
