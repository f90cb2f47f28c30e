"""Compares policy losses on recorded rollouts: `python -m hermes_jax.compare_losses --rollouts RUN --losses grpo,dapo`.

RUN is a run folder (parameters of its newest checkpoint, or of its start) or one of its checkpoints
(RUN/checkpoints/STEP). A loss is `run` (the run's own), a preset or objective by name, or a function of your own,
module:function.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from hermes_jax.compilation_cache import keep_compilations
from hermes_jax.quiet import quiet_libraries


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command; returns the exit status."""
    parser = argparse.ArgumentParser(
        prog="python -m hermes_jax.compare_losses",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--rollouts", type=Path, required=True, metavar="RUN", help="run folder or checkpoint")
    parser.add_argument("--losses", required=True, metavar="NAME,NAME", help="losses, separated by commas")
    parser.add_argument("--step", type=int, help="whose episodes; default: the newest that have different rewards")
    parser.add_argument("--top", type=int, default=5, help="tokens to show per loss (5)")
    parser.add_argument("--to", type=Path, metavar="FILE.png", help="draw a picture (needs matplotlib)")
    options = parser.parse_args(arguments)
    quiet_libraries()

    from hermes_jax.known_errors import KNOWN_ERRORS
    from hermes_jax.loss_comparison import compare_losses
    from hermes_jax.loss_report import check_can_draw, draw, heading, pushed_most, table
    from hermes_jax.replay import open_replay

    try:
        if options.to is not None:
            check_can_draw()
        replay = open_replay(options.rollouts, step=options.step)
        keep_compilations(replay.config().compilation_cache)
        comparison = compare_losses(replay, [name.strip() for name in options.losses.split(",") if name.strip()])
        print(heading(replay, comparison), table(comparison), pushed_most(comparison, options.top), sep="\n\n")
        if options.to is not None:
            draw(comparison, options.to)
            print(f"\npicture: {options.to}")
    except KNOWN_ERRORS as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
