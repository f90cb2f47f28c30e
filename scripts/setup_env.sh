# Sourced by the other scripts: makes a virtual environment with this package, and finds bubblewrap.

# usage: make_env FOLDER EXTRAS    (EXTRAS like "[test]", or "")
make_env() {
    local folder=$1 extras=$2 stamp
    stamp=$folder/.installed
    if [ ! -x "$folder/bin/python" ]; then
        "$(find_python)" -m venv "$folder"
    fi
    if [ ! -f "$stamp" ] || [ pyproject.toml -nt "$stamp" ]; then
        echo "Installing hermes-jax$extras into $folder (a few minutes the first time) ..."
        "$folder/bin/python" -m pip install --quiet --disable-pip-version-check --upgrade pip
        "$folder/bin/python" -m pip install --quiet --disable-pip-version-check -e ".$extras"
        touch "$stamp"
    fi
}

find_python() {
    local name
    for name in "${PYTHON:-python3}" python3.12 python3.11 python3.13; do
        if command -v "$name" >/dev/null && "$name" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then
            command -v "$name"
            return
        fi
    done
    echo "hermes-jax needs Python 3.11 or newer; name one with PYTHON=/path/to/python" >&2
    exit 1
}

# Commands that a model writes run inside bubblewrap; without it nothing runs.
need_bubblewrap() {
    if command -v bwrap >/dev/null; then
        return
    fi
    local install="apt-get install -y bubblewrap"
    if [ "$(id -u)" = 0 ] && command -v apt-get >/dev/null; then
        echo "Installing bubblewrap ..."
        (apt-get update -qq && DEBIAN_FRONTEND=noninteractive $install -qq) >/dev/null
    else
        echo "The sandbox needs bubblewrap. Run this once, then start again:  sudo $install" >&2
        exit 1
    fi
}
