"""Trains an agent: `python -m hermes_jax.train --config FILE [key.sub=value ...]`."""

from __future__ import annotations

import argparse
import asyncio
import os
import sys
from collections.abc import Sequence
from pathlib import Path

from hermes_jax.config import Config, ConfigError, help_config, load
from hermes_jax.run_folder import RunFolder, RunFolderError, open_run_folder


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command; returns the exit status."""
    parser = argparse.ArgumentParser(prog="python -m hermes_jax.train", description=__doc__)
    parser.add_argument("--config", action="append", default=[], metavar="FILE", help="YAML file; later ones win")
    parser.add_argument("--resume", nargs="?", const="", metavar="RUN", help="go on with a run (its folder)")
    parser.add_argument("--overwrite", action="store_true", help="replace what the run folder holds")
    parser.add_argument("--help-config", action="store_true", help="print every option and stop")
    options, overrides = parser.parse_known_args(arguments)
    if options.help_config:
        print(help_config())
        return 0
    try:
        config, run = _config_and_run(options, overrides)
        return _run(config, run, resume=options.resume is not None)
    except (ConfigError, RunFolderError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2


def _config_and_run(options: argparse.Namespace, overrides: list[str]) -> tuple[Config, RunFolder]:
    files = list(options.config)
    if options.resume:
        saved = RunFolder(Path(options.resume)).config
        if not saved.exists():
            raise RunFolderError(f"nothing to resume: {options.resume} holds no run (no config.yaml)")
        files, overrides = [str(saved), *files], [*overrides, f"run_dir={options.resume}"]
    if not files:
        raise ConfigError("give a config: --config FILE, or --resume RUN to go on with a run")
    config = load(*files, overrides=overrides)
    resume = options.resume is not None
    return config, open_run_folder(Path(config.run_dir), resume=resume, overwrite=options.overwrite)


def _run(config: Config, run: RunFolder, *, resume: bool) -> int:
    from hermes_jax.tools.worker import WorkerServer

    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
    with WorkerServer() as worker:  # before jax: nothing forks after it
        from hermes_jax.known_errors import KNOWN_ERRORS
        from hermes_jax.stopping import Stopped
        from hermes_jax.trainer import Trainer

        try:
            asyncio.run(Trainer(config, run, worker, resume=resume).run()).print()
        except Stopped:
            return 130
        except KNOWN_ERRORS as error:
            print(f"error: {error}", file=sys.stderr)
            return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
