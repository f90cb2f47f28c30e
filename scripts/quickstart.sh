#!/usr/bin/env bash
# From nothing to an agent that learned to use a terminal: set-up, warm start, GRPO, before-and-after table.
# Further arguments go to the trainer:  bash scripts/quickstart.sh seed=1
set -euo pipefail
cd "$(dirname "$0")/.."
source scripts/setup_env.sh
make_env .venv ""
need_bubblewrap
# A folder of its own for every start: no run overwrites another.
exec .venv/bin/python -m hermes_jax.train --config configs/quickstart.yaml \
    "run_dir=runs/quickstart-$(date +%Y%m%d-%H%M%S)" "$@"
