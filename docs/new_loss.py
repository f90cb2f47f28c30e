"""A new policy loss, from twenty lines to a run: `python -m docs.new_loss RUN`.

RUN is a run whose episodes are there to compare on; the new run goes on from the policy that RUN started with, in
`RUN-soft_clip`.
"""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path

import jax.numpy as jnp

from hermes_jax import Trainer, WorkerServer, open_run_folder
from hermes_jax.config import load
from hermes_jax.loss_comparison import compare_losses
from hermes_jax.loss_report import heading, pushed_most, table
from hermes_jax.objectives import check_loss
from hermes_jax.quiet import quiet_libraries
from hermes_jax.replay import open_replay

# %% The loss: what it needs it asks for by name; what it returns is a loss per token, and metrics if there are any.


def soft_clip(logprobs, old_logprobs, advantages, *, width=0.3):
    """`-A exp(width tanh((lp - old) / width))`: the ratio is bounded, and its gradient fades instead of stopping."""
    log_ratio = logprobs - old_logprobs
    bounded = width * jnp.tanh(log_ratio / width)
    loss = -jnp.exp(bounded) * advantages
    return loss, {"faded": jnp.abs(log_ratio) > width, "bounded_ratio": jnp.exp(bounded)}


# %% Is it sound?


def check() -> None:
    """The checks that the library's own losses pass."""
    report = check_loss(soft_clip)
    print(report)
    assert report.ok, report


# %% How does it differ from others, on the same rollouts and parameters?


def compare(run: Path) -> None:
    """The run's own loss and the new one."""
    replay = open_replay(run)
    comparison = compare_losses(replay, ["run", "docs.new_loss:soft_clip"])
    print(heading(replay, comparison), table(comparison), pushed_most(comparison, 3), sep="\n\n")


# %% Does it learn?


def train(run: Path, worker: WorkerServer) -> None:
    """A few steps of RUN's config with the new loss."""
    changes = ["model.builder=null", f"model.path={run / 'start'}", "warm_start.steps=0", "env.total_steps=2"]
    config = load(run / "config.yaml", overrides=[*changes, f"run_dir={run}-soft_clip"])
    folder = open_run_folder(Path(config.run_dir), resume=False, overwrite=True)
    asyncio.run(Trainer(config, folder, worker, policy_loss=soft_clip).run()).print()


if __name__ == "__main__":
    quiet_libraries()
    with WorkerServer() as started:  # before jax computes anything
        check()
        compare(Path(sys.argv[1]))
        train(Path(sys.argv[1]), started)
