"""Several policy losses on the same recorded rollouts, from the same parameters."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from hermes_jax.assembly import forward_options, objective_spec
from hermes_jax.config import Config, ConfigError
from hermes_jax.config.presets import PRESETS
from hermes_jax.data.packing import PackedBatch
from hermes_jax.learner.batch_function import BatchFunction
from hermes_jax.learner.update import make_gradient
from hermes_jax.objectives import OBJECTIVES, ObjectiveSpec, PolicyBatch, count_denominators, policy_objective
from hermes_jax.replay import Replay, Scored

KNOWN = ("old_logprobs", "rollout_logprobs", "ref_logprobs")


@dataclass(frozen=True, eq=False)
class Seen:
    """What one loss makes of the rollouts.

    Args:
        name, formula: of the loss.
        loss, grad_norm: of the whole batch.
        clip_low, clip_high: shares of the trained tokens whose ratio is clipped.
        push: minus d loss / d log-prob of each trained token: above 0 it becomes likelier, below 0 less likely.
        advantages: of each trained token.
    """

    name: str
    formula: str
    loss: float
    grad_norm: float
    clip_low: float
    clip_high: float
    push: np.ndarray
    advantages: np.ndarray

    @property
    def effective_tokens(self) -> float:
        """Share of the tokens that carry the update: `(sum |push|)^2 / (n sum push^2)`."""
        return effective_share(np.abs(self.push))


@dataclass(frozen=True, eq=False)
class Comparison:
    """The losses side by side.

    Args:
        losses: one each.
        cosines: of their gradients with respect to the parameters.
        log_ratios: log-prob now minus when sampled, of each trained token.
        texts: each trained token with a little of what stands before it.
    """

    losses: tuple[Seen, ...]
    cosines: np.ndarray
    log_ratios: np.ndarray
    texts: tuple[str, ...]

    @property
    def effective_samples(self) -> float:
        """Kish's effective sample size of the ratios as weights, as a share of the trained tokens."""
        return effective_share(np.exp(self.log_ratios))


def effective_share(weights: np.ndarray) -> float:
    """`(sum w)^2 / (n sum w^2)`: 1 for equal weights, 1/n if one holds everything, 0 if all are 0."""
    squares = float(np.sum(weights.astype(np.float64) ** 2))
    return float(np.sum(weights, dtype=np.float64)) ** 2 / (len(weights) * squares) if squares else 0.0


def overrides_of(name: str) -> list[str]:
    """The config overrides that a loss's name stands for.

    Args:
        name: `run` (the run's own), a preset, a name of `OBJECTIVES`, or `module:function`.

    Raises:
        ConfigError: it is none of these.
    """
    if name == "run":
        return []
    if name in PRESETS:
        return [f"grpo.preset={name}"]
    if name in OBJECTIVES:
        return ["grpo.policy_loss=null", f"grpo.objective={name}"]
    if ":" in name:
        return [f"grpo.policy_loss={name}"]
    known = ", ".join(dict.fromkeys(["run", *PRESETS, *OBJECTIVES]))
    raise ConfigError(f"unknown loss {name!r}: choose among {known}, or give a function of your own as module:function")


def compare_losses(replay: Replay, names: Sequence[str]) -> Comparison:
    """Loss, gradient and pushes of each named loss.

    Raises:
        ConfigError: a name is unknown, or the loss is not what it should be.
    """
    if not names or len(set(names)) < len(names):
        raise ConfigError(f"give at least one loss, and each once; got {', '.join(names) or 'none'}")
    configs = {name: replay.config(overrides_of(name)) for name in names}
    specs = {name: objective_spec(config) for name, config in configs.items()}
    learning = replay.learning(replay.config())
    reference = replay.reference(learning)
    seen, gradients = [], []
    for name in names:
        scored = replay.scored(configs[name], learning, reference)
        one, gradient = _look(name, replay, configs[name], specs[name], scored)
        seen.append(one)
        gradients.append(gradient)
    log_ratios = scored.trained(scored.logprobs - scored.batch.old_logprobs)
    return Comparison(tuple(seen), _cosines(gradients), log_ratios, _texts(replay, scored))


def _look(
    name: str, replay: Replay, config: Config, spec: ObjectiveSpec, scored: Scored
) -> tuple[Seen, list[np.ndarray]]:
    batch, options = scored.batch, forward_options(config, replay.policy)
    gradient = BatchFunction(
        jax.jit(make_gradient(replay.policy.config, spec, replay.mesh, options, known=KNOWN)), replay.mesh
    )
    loss, grads, metrics = jax.device_get(gradient(replay.params, batch))
    leaves = [np.asarray(leaf) for leaf in jax.tree.leaves(grads)]
    push = 0.0 - scored.trained(_token_gradient(spec, scored))
    found = Seen(
        name,
        spec.formula(),
        float(loss),
        float(np.sqrt(_dot(leaves, leaves))),
        float(metrics["clip_frac_low"]),
        float(metrics["clip_frac_high"]),
        push,
        scored.trained(batch.advantages),
    )
    return found, leaves


def _token_gradient(spec: ObjectiveSpec, scored: Scored) -> np.ndarray:
    """d loss / d log-prob of every token; micro-batches are rows of one batch here."""
    batch, names = scored.batch, set(PolicyBatch._fields) & set(PackedBatch._fields)
    arrays = {name: getattr(batch, name) for name in names}
    arrays |= {"logprobs": scored.logprobs, "entropy": scored.entropy}
    view = PolicyBatch(**{name: jnp.asarray(x).reshape(-1, x.shape[-1]) for name, x in arrays.items()})
    counts = count_denominators(view.loss_mask, view.segment_ids, spec.aggregation)

    def loss(x: Any) -> Any:
        return policy_objective(view._replace(logprobs=x), spec, counts)[0]

    return np.asarray(jax.jit(jax.grad(loss))(view.logprobs)).reshape(batch.tokens.shape)


def _dot(a: Sequence[np.ndarray], b: Sequence[np.ndarray]) -> float:
    return sum(float(np.vdot(x.astype(np.float64), y.astype(np.float64))) for x, y in zip(a, b, strict=True))


def _cosines(gradients: Sequence[Sequence[np.ndarray]]) -> np.ndarray:
    """NaN where a gradient is 0."""
    products = np.array([[_dot(a, b) for b in gradients] for a in gradients])
    norms = np.sqrt(np.diag(products))
    norms[norms == 0] = np.nan
    return products / norms[:, None] / norms[None, :]


def _texts(replay: Replay, scored: Scored, before: int = 6) -> tuple[str, ...]:
    batch, decode = scored.batch, replay.policy.tokenizer.decode
    texts = []
    for cell in scored.trained(np.arange(batch.tokens.size).reshape(batch.tokens.shape)):
        micro, row, column = np.unravel_index(cell, batch.tokens.shape)
        start = max(column - before, column - batch.positions[micro, row, column])
        ids = batch.tokens[micro, row]
        texts.append(f"{decode(ids[start:column])!s}[{decode(ids[column : column + 1])!s}]".replace("\n", "\\n"))
    return tuple(texts)
