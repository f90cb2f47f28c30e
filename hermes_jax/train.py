"""Trains an agent: `python -m hermes_jax.train --config FILE [key.sub=value ...]`."""

from __future__ import annotations

import argparse
import asyncio
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from hermes_jax.compilation_cache import keep_compilations
from hermes_jax.config import Config, ConfigError, help_config, load
from hermes_jax.host_memory import reuse_freed_memory
from hermes_jax.quiet import quiet_libraries
from hermes_jax.report import Report
from hermes_jax.resuming import check_same_training
from hermes_jax.run_folder import RunFolder, RunFolderError, open_run_folder
from hermes_jax.stopping import STATUS, Stopped

if TYPE_CHECKING:
    from hermes_jax.tools.worker import WorkerServer


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
        if options.resume is not None and _is_finished(config, run):
            return 0
        return _run(config, run, resume=options.resume is not None)
    except (ConfigError, RunFolderError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("SIGINT: stopped before the run began", file=sys.stderr)
        return STATUS


def _config_and_run(options: argparse.Namespace, overrides: list[str]) -> tuple[Config, RunFolder]:
    files, resume = list(options.config), options.resume is not None
    if "=" in (options.resume or "") and not Path(options.resume).exists():  # --resume key.sub=value
        options.resume, overrides = "", [options.resume, *overrides]
    if options.resume:
        run = open_run_folder(Path(options.resume), resume=resume, overwrite=options.overwrite)
        files, overrides = [str(run.config), *files], [*overrides, f"run_dir={options.resume}"]
    if not files:
        raise ConfigError("give a config: --config FILE, or --resume RUN to go on with a run")
    config = load(*files, overrides=overrides)
    run = open_run_folder(Path(config.run_dir), resume=resume, overwrite=options.overwrite)
    if resume:
        check_same_training(load(run.config), config, run.config)
    return config, run


def _is_finished(config: Config, run: RunFolder) -> bool:
    report = Report.of_finished(run, config.env.total_steps)
    if report is None:
        return False
    print(f"already finished: {run.root} has made all of its {report.step} steps; to go on, raise env.total_steps")
    report.print()
    return True


def _run(config: Config, run: RunFolder, *, resume: bool) -> int:
    from hermes_jax.tools.worker import WorkerServer

    reuse_freed_memory()
    quiet_libraries()
    with WorkerServer() as worker:  # before jax: nothing forks after it
        from hermes_jax.known_errors import KNOWN_ERRORS

        keep_compilations(config.compilation_cache)
        try:
            asyncio.run(_train(config, run, worker, resume))
        except KNOWN_ERRORS as error:
            print(f"error: {error}", file=sys.stderr)
            return 1
    return 0


async def _train(config: Config, run: RunFolder, worker: WorkerServer, resume: bool) -> None:
    from hermes_jax.trainer import Trainer

    try:
        report = await Trainer(config, run, worker, resume=resume).run()
    except Stopped:
        worker.close()
        sys.stdout.flush()
        os._exit(STATUS)  # all is saved; a thread that hangs in somebody's reward function would hold the process
    report.print()


if __name__ == "__main__":
    sys.exit(main())
