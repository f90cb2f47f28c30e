"""Evaluates on held-out tasks: `python -m hermes_jax.evaluate PATH [--config FILE] [key.sub=value ...]`.

PATH is a run folder (its newest checkpoint), a checkpoint (RUN/checkpoints/STEP) or a model folder in HF format.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from hermes_jax.compilation_cache import keep_compilations
from hermes_jax.config import Config
from hermes_jax.host_memory import reuse_freed_memory
from hermes_jax.quiet import quiet_libraries
from hermes_jax.stopping import STATUS
from hermes_jax.tools.worker import WorkerServer


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command; returns the exit status."""
    parser = argparse.ArgumentParser(
        prog="python -m hermes_jax.evaluate", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("path", nargs="?", type=Path, help="run, checkpoint or model; else model.path of the config")
    parser.add_argument("--config", action="append", default=[], metavar="FILE", help="YAML file; later ones win")
    parser.add_argument("--episodes", metavar="FOLDER", type=Path, help="write the episodes here (JSON lines, gzipped)")
    parser.add_argument("--json", action="store_true", help="print the metrics as JSON")
    options, overrides = parser.parse_known_args(arguments)
    quiet_libraries()
    reuse_freed_memory()
    with WorkerServer() as worker:  # before jax: nothing forks after it
        from hermes_jax.config import ConfigError, load
        from hermes_jax.known_errors import KNOWN_ERRORS
        from hermes_jax.saved_policy import config_of, find_policy

        try:
            if options.path is None:
                path = load(*options.config, overrides=overrides).model.path
                if path is None:
                    raise ConfigError("nothing to evaluate: give PATH, or model.path in the config")
                options.path = Path(path)
            saved = find_policy(options.path)
            config = config_of(saved, options.config, overrides)
            keep_compilations(config.compilation_cache)
            metrics = asyncio.run(_evaluate(saved, config, worker, options.episodes))
        except KNOWN_ERRORS as error:
            print(f"error: {error}", file=sys.stderr)
            return 1
        except KeyboardInterrupt:
            print("SIGINT: stopped before the end", file=sys.stderr)
            return STATUS
    print(json.dumps(metrics, indent=2) if options.json else "\n".join(f"{k}: {v}" for k, v in metrics.items()))
    return 0


async def _evaluate(saved: Any, config: Config, worker: WorkerServer, episodes: Path | None) -> dict[str, Any]:
    from hermes_jax.assembly import open_engine, open_mesh
    from hermes_jax.config import ConfigError
    from hermes_jax.engines.device import DeviceThread
    from hermes_jax.episode_failures import require_some
    from hermes_jax.evaluator import evaluate
    from hermes_jax.playing import open_players, open_stage
    from hermes_jax.saved_policy import open_saved, read_params
    from hermes_jax.telemetry.episodes import EpisodeLog

    with DeviceThread() as device:
        policy = open_saved(saved, config)
        players = open_players(await open_stage(config, worker), policy)
        mesh = await device.submit(open_mesh, config, policy)
        params, step = await device.submit(read_params, saved, config, policy, mesh)
        engine = await asyncio.to_thread(open_engine, config, policy, params, device, step)
        try:
            found = await evaluate(players, engine)
        finally:
            await engine.close()
    if found is None:
        raise ConfigError(
            f"nothing to evaluate: env.eval_episodes is {config.env.eval_episodes}, "
            f"or environment {config.env.name} has no held-out tasks"
        )
    if episodes is not None:
        log = EpisodeLog(episodes)
        log.write(step, found.sampled, kind="eval_sampled")
        log.write(step, found.greedy, kind="eval_greedy")
    require_some([*found.sampled, *found.greedy], "the evaluation", rewards=False)
    return {"step": step, **found.metrics}


if __name__ == "__main__":
    sys.exit(main())
