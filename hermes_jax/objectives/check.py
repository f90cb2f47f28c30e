"""The self-test of a policy loss: what the library's own losses keep, a user's should keep, too."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from hermes_jax.objectives.aggregation import Denominators, count_denominators
from hermes_jax.objectives.numeric_gradient import differences, held_fixed
from hermes_jax.objectives.objective import PolicyBatch, policy_objective
from hermes_jax.objectives.sample_batch import ONE_PER_ROW, MadeUp, gather, lay_out, made_up_sequences
from hermes_jax.objectives.spec import ObjectiveSpec
from hermes_jax.objectives.user_loss import LossError, call_loss, complaint, place_of

Rows = tuple[tuple[int, ...], ...]
PACKED: Rows = ((0, 3, 6), (1, 4), (5, 2))
SHUFFLED: Rows = ((6,), (2,), (5,), (0,), (3,), (1,), (4,))
TOLERANCE = 1e-4
"""Of the largest gradient: what a different order of additions in float32 may change."""


@dataclass(frozen=True)
class Check:
    """Result of one check: its name, what was found, and whether that is as it should be; None = it was not run."""

    name: str
    passed: bool | None
    detail: str


@dataclass(frozen=True)
class LossReport:
    """What `check_loss` found; printed, it is a line per check."""

    loss: str
    checks: tuple[Check, ...]

    @property
    def ok(self) -> bool:
        """Whether all checks passed."""
        return all(check.passed for check in self.checks)

    @property
    def failed(self) -> tuple[str, ...]:
        """Names of the checks that did not pass."""
        return tuple(check.name for check in self.checks if check.passed is False)

    def __str__(self) -> str:
        verdict = "passed" if self.ok else f"FAILED: {', '.join(self.failed)}"
        marks = {True: "ok  ", False: "FAIL", None: "-   "}
        lines = [f"  {marks[c.passed]} {c.name:<18} {c.detail}" for c in self.checks]
        return "\n".join([f"check of policy loss {self.loss}: {verdict}", *lines])


class _Broken(Exception):
    """What a check found wrong."""


def check_loss(loss: str | Callable[..., Any] | ObjectiveSpec, **options: Any) -> LossReport:
    """Tries a policy loss on a small made-up batch.

    Args:
        loss: a function, a name of `OBJECTIVES`, or a whole objective.
        options: fields of `ObjectiveSpec` for it, such as `clip_low`.

    Returns:
        The report: `print` it, or `assert report.ok, report`.
    """
    name = place_of(loss) if callable(loss) else loss if isinstance(loss, str) else loss.formula()
    done: list[Check] = []
    try:
        spec = loss if isinstance(loss, ObjectiveSpec) else ObjectiveSpec(loss, **options)
    except LossError as error:
        return LossReport(name, (Check("signature", False, str(error)), *_not_run(list(CHECKS)[1:])))
    for title, check in CHECKS.items():
        try:
            done.append(Check(title, True, check(spec)))
        except (LossError, _Broken) as error:
            done.append(Check(title, False, str(error)))
            if title in FIRST:
                return LossReport(name, (*done, *_not_run(list(CHECKS)[len(done) :])))
    return LossReport(name, tuple(done))


def try_loss(spec: ObjectiveSpec) -> None:
    """The checks without which a run could not even begin, for a user's loss.

    Raises:
        LossError: one failed; the message shows the offending value and the expected signature.
    """
    for title in FIRST:
        try:
            CHECKS[title](spec)
        except _Broken as broken:
            raise complaint(spec.function, str(broken)) from broken


def _not_run(names: list[str]) -> list[Check]:
    return [Check(name, None, "not run") for name in names]


# -- the checks: each returns what it found, or raises -----------------------------------------------------------------


def _signature(spec: ObjectiveSpec) -> str:
    """Shape and dtype of what comes back; the call itself is checked by `call_loss`."""
    _evaluate(spec, lay_out(made_up_sequences(), PACKED, spare=1))
    options = f"; options {', '.join(spec.options)}" if spec.options else ""
    return f"asks for {', '.join(spec.arrays)}{options}"


def _pure(spec: ObjectiveSpec) -> str:
    """The same numbers each time, compiled and not; nothing that is traced is kept."""
    batch = lay_out(made_up_sequences(), PACKED)

    def per_token(batch: PolicyBatch) -> Any:
        return jnp.where(batch.loss_mask, _raw(spec, batch), 0.0)

    once, again = np.asarray(per_token(batch)), np.asarray(per_token(batch))
    try:
        with jax.checking_leaks():
            compiled = np.asarray(jax.jit(per_token)(batch))
    except LossError:
        raise
    except Exception as error:
        if "leak" not in str(error).lower():
            raise
        raise _Broken(
            "has a side effect under jit: it keeps an array of a trace (in a global, a list, an attribute), which is "
            "dead once the trace has ended; return it as a metric instead"
        ) from error
    for other, when in ((again, "called twice"), (compiled, "compiled by jax.jit")):
        if not np.allclose(once, other, rtol=1e-4, atol=1e-6, equal_nan=True):
            at = tuple(int(i) for i in np.argwhere(~np.isclose(once, other, rtol=1e-4, atol=1e-6, equal_nan=True))[0])
            raise _Broken(
                f"gives other values when {when}: {once[at]:.6g} and then {other[at]:.6g} at {at}. Whatever changes "
                "between calls (counters, random numbers of numpy, time) is frozen by the one trace of jax.jit: a side "
                "effect can't work there"
            )
    return "the same values twice, and compiled"


def _finite(spec: ObjectiveSpec) -> str:
    """No NaN on an ordinary batch."""
    batch = lay_out(made_up_sequences(), PACKED)
    _require_finite(spec, batch, "on an ordinary batch")
    return "loss and gradient are finite on an ordinary batch"


def _mask(spec: ObjectiveSpec) -> str:
    """The function itself, on arrays that nobody has cleaned."""
    batch = lay_out(made_up_sequences(), PACKED, spare=1)
    outside = ~np.asarray(batch.loss_mask)
    for name in _differentiable(spec):

        def total(x: Any, name: str = name) -> Any:
            return jnp.sum(jnp.where(batch.loss_mask, _raw(spec, batch._replace(**{name: x})), 0.0))

        gradient = np.where(outside, np.asarray(jax.grad(total)(getattr(batch, name))), 0)
        if gradient.any():
            at = _worst(gradient)
            raise _Broken(
                f"the loss of trained tokens depends on {name} of tokens that are not: d loss / d {name}{list(at)} is "
                f"{gradient[at]:.3g}. Where it adds up tokens it must leave those out (jnp.where(loss_mask, ..., 0), "
                "segment_means)"
            )
    return "no gradient from masked tokens"


def _padding(spec: ObjectiveSpec) -> str:
    return _same(spec, [(ONE_PER_ROW, 3)], "with three more columns and rows of padding")


def _packing(spec: ObjectiveSpec) -> str:
    return _same(spec, [(PACKED, 0)], "with several sequences in a row", remedy="sum by segment_ids, not over a row")


def _micro_batches(spec: ObjectiveSpec) -> str:
    parts: list[tuple[Rows, int]] = [(ONE_PER_ROW[:2], 0), (ONE_PER_ROW[2:], 0)]
    return _same(spec, parts, "cut into two micro-batches", remedy="don't divide by counts or means of the batch")


def _permutation(spec: ObjectiveSpec) -> str:
    return _same(spec, [(SHUFFLED, 0)], "with the sequences in another order")


def _extreme(spec: ObjectiveSpec) -> str:
    """Log ratios of up to 1000 nats to both sides, with both signs of the advantage."""
    sequences = made_up_sequences()
    for number, sequence in enumerate(sequences):
        far = np.resize([-30.0, -1e-6, -100.0, -1e-6, -1000.0], len(sequence["logprobs"]))
        other = np.resize([-1e-6, -30.0, -1e-6, -100.0, -1e-6], len(far))
        sequence["logprobs"], sequence["old_logprobs"] = (far, other) if number % 2 else (other, far)
        sequence["ref_logprobs"] = sequence["rollout_logprobs"] = sequence["old_logprobs"]
        sequence["advantages"] = np.full(len(far), 10.0 if number % 4 < 2 else -10.0)
    _require_finite(
        spec,
        lay_out(sequences, PACKED),
        "where old and new policy differ by up to 1000 nats",
        "bound exponents before exp (objectives.guard)",
    )
    return "finite where old and new policy differ by up to 1000 nats"


def _garbage(spec: ObjectiveSpec) -> str:
    """NaN and infinity in masked places of arrays that nobody has cleaned change no trained token's loss."""
    ordinary = lay_out(made_up_sequences(), PACKED, spare=1)
    mask = np.asarray(ordinary.loss_mask)
    garbage = np.resize([np.nan, np.inf, -np.inf], mask.shape)
    floats = {n: a for n, a in ordinary._asdict().items() if a is not None and jnp.issubdtype(a.dtype, jnp.floating)}
    batch = ordinary._replace(**{n: jnp.where(mask, a, garbage) for n, a in floats.items()})
    want, got = (np.where(mask, np.asarray(_raw(spec, b)), 0) for b in (ordinary, batch))
    if not np.allclose(want, got, rtol=TOLERANCE, atol=1e-6):
        at = tuple(int(i) for i in np.argwhere(~np.isclose(want, got, rtol=TOLERANCE, atol=1e-6))[0])
        raise _Broken(
            f"with NaN and infinity in masked places the loss of the trained token {list(at)} is {got[at]:.5g}, "
            f"without {want[at]:.5g}. Where it adds up tokens it must leave masked ones out first "
            "(jnp.where(loss_mask, ..., 0), segment_means)"
        )
    _require_finite(spec, batch, "with NaN and infinity in masked places")
    return "NaN and infinity in masked places change nothing"


def _zero_advantage(spec: ObjectiveSpec) -> str:
    sequences = [s | {"advantages": np.zeros_like(s["advantages"])} for s in made_up_sequences()]
    _, gradients = _evaluate(spec, lay_out(sequences, PACKED))
    for name, gradient in gradients.items():
        if gradient.any():
            at = _worst(gradient)
            raise _Broken(
                f"with all advantages 0 there is a gradient: d loss / d {name}{list(at)} is {gradient[at]:.3g}. A term "
                "that does not depend on the advantage (KL, entropy) has options of its own (beta, entropy_coef)"
            )
    return "no gradient where all advantages are 0"


def _numeric(spec: ObjectiveSpec) -> str:
    """Central differences in float64; what is under stop_gradient is held fixed, and kinks are left out."""
    judged = 0
    with jax.enable_x64(True):
        batch = lay_out(made_up_sequences(), PACKED)
        counts = count_denominators(batch.loss_mask, batch.segment_ids, spec.aggregation)
        for name in _differentiable(spec):

            def loss(x: Any, name: str = name) -> Any:
                return policy_objective(batch._replace(**{name: x}), spec, counts)[0]

            at = getattr(batch, name)
            gradient = np.asarray(jax.grad(loss)(at))
            ahead, behind = differences(held_fixed(loss, at), at, 1e-4)
            scale = max(float(np.abs(gradient).max()), 1e-6)
            smooth = np.abs(ahead - behind) <= 0.02 * scale
            wrong = np.where(smooth, np.abs((ahead + behind) / 2 - gradient), 0) > 2e-3 * scale
            judged += int((smooth & np.asarray(batch.loss_mask)).sum())
            if wrong.any():
                at_ = tuple(int(i) for i in np.argwhere(wrong)[0])
                raise _Broken(
                    f"d loss / d {name}{list(at_)} is {gradient[at_]:.5g} by autodiff but "
                    f"{(ahead + behind)[at_] / 2:.5g} by finite differences: a custom derivative is wrong?"
                )
        if not judged:
            raise _Broken("is smooth at no token: the gradient can't be judged by finite differences")
    return f"autodiff agrees with finite differences at {judged} places"


CHECKS: dict[str, Callable[[ObjectiveSpec], str]] = {
    "signature": _signature,
    "pure": _pure,
    "finite": _finite,
    "mask": _mask,
    "padding": _padding,
    "packing": _packing,
    "micro-batches": _micro_batches,
    "permutation": _permutation,
    "extreme ratios": _extreme,
    "masked NaN": _garbage,
    "zero advantage": _zero_advantage,
    "numeric gradient": _numeric,
}
FIRST = ("signature", "pure", "finite")
"""Checks without which the others would only repeat the same."""


# -- how they look at a loss -------------------------------------------------------------------------------------------


def _differentiable(spec: ObjectiveSpec) -> list[str]:
    """Arrays through which a gradient flows."""
    return ["logprobs"] + ["entropy"] * ("entropy" in spec.arrays)


def _raw(spec: ObjectiveSpec, batch: PolicyBatch) -> Any:
    """The function's own loss per token, of arrays as they are."""
    arrays = {name: getattr(batch, name) for name in spec.arrays}
    options = {name: getattr(spec, name) for name in spec.options}
    return call_loss(spec.function, arrays, options, batch.loss_mask.shape).loss


def _evaluate(
    spec: ObjectiveSpec, batch: PolicyBatch, counts: Denominators | None = None
) -> tuple[float, dict[str, np.ndarray]]:
    """The loss and its gradients, through the library, as in an update."""
    counts = counts or count_denominators(batch.loss_mask, batch.segment_ids, spec.aggregation)

    def loss(given: dict[str, Any], batch: PolicyBatch, counts: Denominators) -> Any:
        return policy_objective(batch._replace(**given), spec, counts)[0]

    given = {name: getattr(batch, name) for name in _differentiable(spec)}
    value, gradients = jax.jit(jax.value_and_grad(loss))(given, batch, counts)
    return float(value), {name: np.asarray(gradient) for name, gradient in gradients.items()}


def _same(spec: ObjectiveSpec, parts: list[tuple[Rows, int]], how: str, *, remedy: str = "") -> str:
    """Loss and gradients of the sequences in these parts are those of one sequence per row."""
    sequences = made_up_sequences()
    plain = lay_out(sequences, ONE_PER_ROW)
    counts = count_denominators(plain.loss_mask, plain.segment_ids, spec.aggregation)
    want, want_gradients = _evaluate(spec, plain, counts)
    got, found = 0.0, {name: np.zeros(sum(len(s["logprobs"]) for s in sequences)) for name in want_gradients}
    for rows, spare in parts:
        members = sorted(n for row in rows for n in row)
        loss, gradients = _evaluate(spec, lay_out(sequences, rows, spare=spare), counts)
        got += loss
        for name, gradient in gradients.items():
            found[name][_tokens_of(sequences, members)] = gather(gradient, sequences, rows)
    hint = f"; {remedy}" if remedy else ""
    if not np.isclose(got, want, rtol=TOLERANCE, atol=TOLERANCE):
        raise _Broken(f"{how} the loss is {got:.6g}, without {want:.6g}{hint}")
    for name, values in want_gradients.items():
        plainly = gather(values, sequences, ONE_PER_ROW)
        off = np.abs(found[name] - plainly)
        if off.max() > TOLERANCE * max(float(np.abs(plainly).max()), 1e-6):
            at = int(off.argmax())
            raise _Broken(
                f"{how} d loss / d {name} of token {at} is {found[name][at]:.5g}, without {plainly[at]:.5g}{hint}"
            )
    return f"the same loss and gradient {how}"


def _tokens_of(sequences: MadeUp, members: list[int]) -> np.ndarray:
    ends = np.cumsum([len(s["logprobs"]) for s in sequences])
    return np.concatenate([np.arange(ends[n] - len(sequences[n]["logprobs"]), ends[n]) for n in members])


def _require_finite(spec: ObjectiveSpec, batch: PolicyBatch, where: str, remedy: str = "") -> None:
    hint = f"; {remedy}" if remedy else ""
    per_token = np.where(np.asarray(batch.loss_mask), np.asarray(_raw(spec, batch)), 0)
    if not np.isfinite(per_token).all():
        at = tuple(int(i) for i in np.argwhere(~np.isfinite(per_token))[0])
        raise _Broken(f"gives a loss of {per_token[at]} {where}, at {at}{hint}")
    for name, gradient in _evaluate(spec, batch)[1].items():
        if not np.isfinite(gradient).all():
            at = tuple(int(i) for i in np.argwhere(~np.isfinite(gradient))[0])
            raise _Broken(f"has a finite loss {where}, but d loss / d {name}{list(at)} is {gradient[at]}{hint}")


def _worst(gradient: np.ndarray) -> tuple[int, ...]:
    return tuple(int(i) for i in np.unravel_index(np.abs(gradient).argmax(), gradient.shape))
