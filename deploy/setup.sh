#!/usr/bin/env bash
# Sets up what autotune needs on a Debian- or Ubuntu-like machine. The Makefile calls it.
#   setup.sh python VENV   the Python environment in VENV, torch included
#   setup.sh frameworks DIR  environments of training frameworks in DIR, which tests tune
#   setup.sh services      PostgreSQL, Redis, iproute2 and openssl, which the tests run
# System packages are installed only where something is missing, and only as root or through sudo.
set -euo pipefail
cd "$(dirname "$0")/.."

fail() {
    echo "setup: $*" >&2
    exit 1
}

install_packages() { # PACKAGE...
    local as_root=()
    command -v apt-get >/dev/null || fail "please install: $* (there is no apt-get here to do it)"
    if [ "$(id -u)" -ne 0 ]; then
        command -v sudo >/dev/null || fail "please install as root: apt-get install $*"
        as_root=(sudo)
    fi
    echo "setup: installing system packages: $*"
    "${as_root[@]}" apt-get update -qq
    "${as_root[@]}" env DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends "$@" </dev/null
}

usable() { # PYTHON: 3.11 or newer, and able to make an environment
    "$1" -c 'import sys, ensurepip, venv; sys.exit(sys.version_info < (3, 11))' 2>/dev/null
}

find_python() {
    local candidate
    for candidate in "${PYTHON:-python3}" python3.13 python3.12 python3.11 /usr/bin/python3; do
        if usable "$candidate"; then
            echo "$candidate"
            return
        fi
    done
    return 1
}

setup_python() { # VENV
    local venv=$1 python
    if ! python=$(find_python); then
        install_packages python3 python3-venv
        python=$(find_python) || fail "Python 3.11 or newer is needed; name one with PYTHON=/path/to/python3 make ..."
    fi
    [ -x "$venv/bin/python" ] || "$python" -m venv "$venv"
    local torch
    torch=$("$venv/bin/python" -c 'import tomllib
print(tomllib.load(open("pyproject.toml", "rb"))["project"]["optional-dependencies"]["torch"][0])')
    if [ -n "${TORCH_INDEX_URL:-}" ]; then
        "$venv/bin/pip" install --quiet --index-url "$TORCH_INDEX_URL" "$torch"
    elif ! command -v nvidia-smi >/dev/null; then
        echo "setup: no NVIDIA GPU here; if the package index serves a CUDA build of torch (some GB), it works but is" \
            "large: set TORCH_INDEX_URL to an index of CPU builds to avoid it"
    fi
    echo "setup: installing Python packages into $venv"
    "$venv/bin/pip" install --quiet --editable '.[torch,postgres,service,report,dev]'
}

setup_framework() { # VENV PACKAGE...
    local venv=$1
    shift
    [ -x "$venv/bin/python" ] || "$(find_python)" -m venv "$venv"
    "$venv/bin/pip" install --quiet ${TORCH_INDEX_URL:+--extra-index-url "$TORCH_INDEX_URL"} "$@"
}

setup_frameworks() { # DIR
    setup_framework "$1/programs" 'torch<2.14' numpy 'transformers<6' accelerate 'deepspeed<0.20' 'megatron-core==0.16.*' \
        six regex triton
    setup_framework "$1/torchtitan-0.2" 'torch<2.14' 'torchtitan==0.2.*' triton
    setup_framework "$1/torchtitan-0.3" 'torch<2.14' 'torchtitan==0.3.*' triton
    setup_framework "$1/parsers" 'torch<2.14' numpy 'transformers<6' accelerate 'deepspeed<0.20' \
        datasets dacite torchtyping 'typeguard<3' triton # what nanotron's configs import
}

setup_services() {
    local missing=()
    compgen -G '/usr/lib/postgresql/*/bin/initdb' >/dev/null || command -v initdb >/dev/null || missing+=(postgresql)
    command -v redis-server >/dev/null || missing+=(redis-server)
    command -v openssl >/dev/null || missing+=(openssl)
    PATH="$PATH:/usr/sbin:/sbin" command -v ip >/dev/null || missing+=(iproute2)
    [ ${#missing[@]} -eq 0 ] || install_packages "${missing[@]}"
}

case "${1:-}" in
python) setup_python "${2:?the folder of the environment}" ;;
frameworks) setup_frameworks "${2:?the folder of the environments}" ;;
services) setup_services ;;
*) fail "say python VENV, frameworks DIR or services" ;;
esac
