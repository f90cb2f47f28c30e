"""Writes a trained policy in Hugging Face format: `python -m hermes_jax.export RUN --to DIR`.

RUN is a run folder (its newest checkpoint; --best for the best) or one checkpoint (RUN/checkpoints/STEP).
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
        prog="python -m hermes_jax.export", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("run", type=Path, help="run folder or checkpoint")
    parser.add_argument("--to", type=Path, required=True, metavar="DIR", help="an earlier export is replaced")
    parser.add_argument("--best", action="store_true", help="the checkpoint with the best checkpoint.best_metric")
    parser.add_argument("--dtype", choices=("float32", "bfloat16", "float16"), help="default: as in the source model")
    options = parser.parse_args(arguments)
    quiet_libraries()

    from hermes_jax.assembly import open_mesh
    from hermes_jax.known_errors import KNOWN_ERRORS
    from hermes_jax.models import save_model
    from hermes_jax.saved_policy import config_of, find_policy, open_saved, read_params

    try:
        saved = find_policy(options.run)
        unused = [] if saved.run else ["env.max_token_length=1"]  # it might not fit into the context of a model folder
        config = config_of(saved, [], unused)
        keep_compilations(config.compilation_cache)
        policy = open_saved(saved, config)
        params, step = read_params(saved, config, policy, open_mesh(config, policy), best=options.best)
        save_model(params, policy.config, policy.folder, options.to, dtype=options.dtype)
    except KNOWN_ERRORS as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    print(f"step {step} of {options.run} written to {options.to}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
