#!/usr/bin/env bash
# Checks this checkout on a GPU: engine against learner, speed, memory; JSON on stdout. Takes less than 8 minutes.
#
#   bash scripts/gpu_check.sh [--out FILE] [--allow-cpu] [--sections parity,learner_bf16,engine,learner_fp32]
#
# Installs and fetches nothing. Needs a Python ($PYTHON, else python3, python or .venv/bin/python) that has jax and flax.
# Exit status: 0 all well, 1 something failed (see the JSON), 2 a package is missing, 3 there is no GPU.
set -euo pipefail
here=$(cd "$(dirname "$0")" && pwd)

has_jax() {
    command -v "$1" >/dev/null && "$1" - <<'PYTHON' >/dev/null 2>&1
import importlib.util, sys
sys.exit(sys.version_info < (3, 11) or any(importlib.util.find_spec(name) is None for name in ("jax", "flax", "optax")))
PYTHON
}

if [ -n "${PYTHON:-}" ]; then
    has_jax "$PYTHON" || { echo "PYTHON=$PYTHON is no Python 3.11 or newer with jax, flax and optax" >&2; exit 2; }
    exec "$PYTHON" "$here/gpu_check.py" "$@"
fi
for python in python3 python "$here/../.venv/bin/python"; do
    if has_jax "$python"; then
        exec "$python" "$here/gpu_check.py" "$@"
    fi
done
echo "no Python 3.11 or newer with jax, flax and optax among python3, python, .venv/bin/python: set PYTHON=..." >&2
exit 2
