"""An objective as a value: what the update minimises, in one frozen, hashable, printable object."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import Any

from hermes_jax.objectives.aggregation import check_mode
from hermes_jax.objectives.correction import Correction
from hermes_jax.objectives.kl import KL_KINDS
from hermes_jax.objectives.policy import OBJECTIVES
from hermes_jax.objectives.user_loss import Asked, asked_for, name_of, place_of


@dataclass(frozen=True)
class ObjectiveSpec:
    """`aggregate(weight * surrogate) + beta * aggregate(kl) - entropy_coef * aggregate(entropy)`.

    Attributes:
        objective: a name of `OBJECTIVES`, or a function like those: see `user_loss` for what it may ask for and return
            (it must be hashable to be a static argument).
        clip_low, clip_high: distances of the clip range from ratio 1; None = no bound on that side.
        dual_clip: bound `c > 1` on the ratio of tokens with negative advantage; None = off.
        tau_pos, tau_neg: temperatures of `sapo`.
        tv_max: of `dppo`, how far a token's probability may move.
        log_ratio_clamp: bound in nats on the exponent of a policy ratio; None = off.
        aggregation: a name of `AGGREGATIONS`, used for every term.
        max_tokens: generated tokens that a sequence may have; `constant` needs it.
        kl: a name of `KL_KINDS`; None = no KL term. With `beta == 0` it is measured, not minimised.
        beta: weight of the KL term.
        kl_clamp: bound on the KL estimate per token; None = off.
        entropy_coef: weight of the entropy bonus.
        correction: weights for the difference between serving engine and trainer; None = off.
    """

    objective: str | Callable[..., Any] = "clip"
    clip_low: float | None = 0.2
    clip_high: float | None = 0.28
    dual_clip: float | None = None
    tau_pos: float = 1.0
    tau_neg: float = 1.05
    tv_max: float = 0.15
    log_ratio_clamp: float | None = 20.0
    aggregation: str = "token_mean"
    max_tokens: int | None = None
    kl: str | None = None
    beta: float = 0.0
    kl_clamp: float | None = None
    entropy_coef: float = 0.0
    correction: Correction | None = None

    def __post_init__(self) -> None:
        check_mode(self.aggregation, self.max_tokens)
        self._check_objective()
        self._check_bounds()
        if self.kl is not None and self.kl not in KL_KINDS:
            raise ValueError(f"unknown KL estimator {self.kl!r}; choose one of {', '.join(KL_KINDS)}")
        if self.kl is None and self.beta != 0:
            raise ValueError(f"beta={self.beta} has no KL term to weigh; set kl to one of {', '.join(KL_KINDS)}")

    @property
    def function(self) -> Callable[..., Any]:
        """The surrogate loss."""
        return OBJECTIVES[self.objective] if isinstance(self.objective, str) else self.objective

    @property
    def arrays(self) -> tuple[str, ...]:
        """The arrays that the surrogate loss asks for."""
        return self._asked.arrays

    @property
    def options(self) -> tuple[str, ...]:
        """The fields of this spec that the surrogate loss uses."""
        return self._asked.options

    @property
    def _asked(self) -> Asked:
        return asked_for(self.function, self._known)

    @property
    def _known(self) -> list[str]:
        return [field.name for field in fields(self) if field.name != "objective"]

    def formula(self) -> str:
        """The objective in one line, with the numbers in force."""
        loss = _equation(self)
        if self.correction is not None:
            loss = f"w * {loss}"
        line = f"loss = {self._aggregated(loss)}"
        if self.kl is not None and self.beta != 0:
            clamp = "" if self.kl_clamp is None else f", clamped at {self.kl_clamp:g}"
            line += f" + {self.beta:g} * {self._aggregated(f'{self.kl}(lp - ref{clamp})')}"
        if self.entropy_coef != 0:
            line += f" - {self.entropy_coef:g} * {self._aggregated('entropy')}"
        if not isinstance(self.objective, str):
            line += f"; {name_of(self.objective)} = {place_of(self.objective)}, in place of a named objective"
        elif ratio := _ratio(self):
            line += f"; {ratio}"
        return line if self.correction is None else f"{line}; w = {self.correction}"

    def warnings(self) -> tuple[str, ...]:
        """What is allowed but hardly meant, each with a remedy."""
        found = []
        if self.kl == "k1" and self.beta != 0:
            found.append(
                "kl k1 in the loss has a zero expected gradient: it adds noise and no pull to the reference; "
                "use k2 (reverse KL) or k3 (forward KL)"
            )
        if self.objective in ("gspo", "gspo_token") and min(self.clip_low or 0, self.clip_high or 0) >= 0.1:
            found.append(
                f"{self.objective} clips the sequence's mean ratio, which stays near 1: a range of "
                f"{self.clip_low:g}/{self.clip_high:g} hardly ever binds; 3e-4/4e-4 is usual"
            )
        return tuple(found)

    def _aggregated(self, term: str) -> str:
        return f"{self.aggregation}[{term}]" + (f" (max_tokens={self.max_tokens})" if self.max_tokens else "")

    def _check_objective(self) -> None:
        if isinstance(self.objective, str) and self.objective not in OBJECTIVES:
            raise ValueError(
                f"unknown objective {self.objective!r}; choose one of {', '.join(OBJECTIVES)}, or a function"
            )
        asked_for(self.function, self._known)

    def _check_bounds(self) -> None:
        for name in ("clip_low", "clip_high", "beta"):
            if (value := getattr(self, name)) is not None and value < 0:
                raise ValueError(f"{name} must be >= 0, got {value}")
        for name in ("kl_clamp", "log_ratio_clamp", "tau_pos", "tau_neg", "tv_max"):
            if (value := getattr(self, name)) is not None and value <= 0:
                raise ValueError(f"{name} must be > 0, got {value}")
        if self.dual_clip is not None and self.dual_clip <= 1:
            raise ValueError(
                f"dual_clip bounds the ratio of tokens with negative advantage and must be > 1, got {self.dual_clip}"
            )


def _equation(spec: ObjectiveSpec) -> str:
    if not isinstance(spec.objective, str):
        return f"{name_of(spec.objective)}({', '.join(f'{option}={getattr(spec, option)}' for option in spec.options)})"
    low = "-inf" if spec.clip_low is None else f"{1 - spec.clip_low:g}"
    high = "inf" if spec.clip_high is None else f"{1 + spec.clip_high:g}"
    clipped = f"-min(r A, clip(r, {low}, {high}) A)"
    if spec.objective == "clip" and spec.dual_clip is not None:
        clipped = f"min({clipped}, -{spec.dual_clip:g} A if A < 0)"
    return {
        "reinforce": "-A lp",
        "cispo": f"-sg(clip(r, {low}, {high})) A lp",
        "gmpo": f"-g A, g = geometric mean of (min(r, {high}) if A > 0 else max(r, {low}))",
        "dppo": f"-(0 if abs(p - p_old) > {spec.tv_max:g} and (r - 1) A > 0 else r A)",
        "sapo": f"-4/tau sigmoid(tau (r - 1)) A, tau = {spec.tau_pos:g} if A > 0 else {spec.tau_neg:g}",
    }.get(spec.objective, clipped)


def _ratio(spec: ObjectiveSpec) -> str:
    if "log_ratio_clamp" not in spec.options:
        return ""
    exponent = "mean(lp - old)" if spec.objective in ("gspo", "gspo_token") else "lp - old"
    if spec.log_ratio_clamp is not None:
        exponent = f"clip({exponent}, +-{spec.log_ratio_clamp:g})"
    token = " through the token's own lp" if spec.objective == "gspo_token" else ""
    return f"r = exp({exponent}){token}"
