"""A comparison of losses as text and as a picture."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import numpy as np

from hermes_jax.config import ConfigError
from hermes_jax.loss_comparison import Comparison, Seen
from hermes_jax.replay import Replay


def heading(replay: Replay, comparison: Comparison) -> str:
    """What was replayed, and how far the parameters are from those that sampled it."""
    ratios = np.exp(comparison.log_ratios)
    episodes = sum(len(group.episodes) for group in replay.groups)
    start = "the start" if replay.params_step == 0 else f"checkpoint {replay.params_step}"
    return (
        f"step {replay.step}: {episodes} episodes in {len(replay.groups)} groups, {len(ratios)} trained tokens; "
        f"parameters of {start}\n"
        f"ratio to the policy that sampled them: {ratios.min():.4f} to {ratios.max():.4f}, "
        f"effective sample size {comparison.effective_samples:.1%} of the tokens"
    )


def table(comparison: Comparison) -> str:
    """One line per loss, then the cosines of their gradients."""
    losses = comparison.losses
    wide = max(len("loss"), *(len(loss.name) for loss in losses))
    lines = [f"{'loss':<{wide}}  {'value':>11} {'grad norm':>11} {'clip low':>9} {'clip high':>9} {'eff. tokens':>11}"]
    lines += [
        f"{x.name:<{wide}}  {x.loss:>11.4g} {x.grad_norm:>11.4g} {x.clip_low:>9.1%} {x.clip_high:>9.1%} "
        f"{x.effective_tokens:>11.1%}"
        for x in losses
    ]
    lines += ["", "cosine of gradients"]
    for loss, row in zip(losses, comparison.cosines, strict=True):
        lines.append(f"{loss.name:<{wide}}  " + " ".join(f"{value:>7.3f}" for value in row))
    lines += ["", *(f"{loss.name}: {loss.formula}" for loss in losses)]
    return "\n".join(lines)


def pushed_most(comparison: Comparison, count: int) -> str:
    """The tokens (in brackets, after what stands before them) that each loss pushes most, up (+) or down (-)."""
    lines = []
    for loss in comparison.losses:
        lines.append(f"{loss.name} pushes most" if loss.push.any() else f"{loss.name} pushes no token")
        for n in np.argsort(-np.abs(loss.push), kind="stable")[: count if loss.push.any() else 0]:
            lines.append(
                f"  {loss.push[n]:+.3e}  ratio {np.exp(comparison.log_ratios[n]):.3f}  A {loss.advantages[n]:+.2f}  "
                f"{comparison.texts[n]}"
            )
    return "\n".join(lines)


def check_can_draw() -> None:
    """Raises ConfigError where matplotlib is not installed."""
    if importlib.util.find_spec("matplotlib") is None:
        raise ConfigError("a picture needs matplotlib: pip install matplotlib, or leave out --to")


def draw(comparison: Comparison, file: Path) -> None:
    """Left the cosines of the gradients, right how much every token counts, over its ratio."""
    check_can_draw()
    from matplotlib.figure import Figure

    losses = comparison.losses
    figure = Figure(figsize=(10, 4))
    left, right = figure.subplots(1, 2)
    left.imshow(comparison.cosines, vmin=-1, vmax=1, cmap="RdBu")
    for (i, j), value in np.ndenumerate(comparison.cosines):
        color = "white" if abs(value) > 0.6 else "black"
        left.text(j, i, f"{value:.2f}", ha="center", va="center", fontsize=8, color=color)
    names = [loss.name.rpartition(":")[2] for loss in losses]
    left.set(xticks=range(len(losses)), yticks=range(len(losses)), title="Cosine of gradients")
    left.set_xticklabels(names, rotation=30, ha="right")
    left.set_yticklabels(names)
    for number, (loss, name) in enumerate(zip(losses, names, strict=True)):
        ratios, weights = _weights(loss, comparison.log_ratios)
        right.plot(ratios, weights, ".", ms=4, color=f"C{number}", label=name)
    right.set(xlabel="ratio to the policy that sampled", ylabel="push / advantage, mean 1")
    right.set_title("How much a token of that ratio counts")
    right.legend(frameon=False, fontsize=8)
    figure.tight_layout()
    file.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(file, dpi=110)


def _weights(loss: Seen, log_ratios: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Ratio and push per advantage where there is an advantage, scaled to a mean size of 1."""
    given = np.abs(loss.advantages) > 1e-6
    weights = loss.push[given] / loss.advantages[given]
    return np.exp(log_ratios[given]), weights / max(float(np.abs(weights).mean()), 1e-30)
