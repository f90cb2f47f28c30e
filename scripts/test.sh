#!/usr/bin/env bash
# Makes the test environment and runs all tests.   --setup-only: stop after the environment.   Other arguments go to pytest.
set -euo pipefail
cd "$(dirname "$0")/.."
source scripts/setup_env.sh
make_env .venv-test "[test]"
need_bubblewrap
.venv-test/bin/python scripts/get_smollm2.py --to models/smollm2
if [ "${1:-}" = --setup-only ]; then
    exit 0
fi
export JAX_PLATFORMS=${JAX_PLATFORMS:-cpu}
exec .venv-test/bin/python -m pytest "$@"
