#!/usr/bin/env bash
# Installs the real cupy and NCCL into environments of their own, and checks the fake and the backend against
# them. None of it needs a GPU. tests/environment.sh says where it does not.
#
#   bash tests/real_cupy.sh [ARGS OF PYTEST]
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
source tests/environment.sh

# Checks a version of cupy, up to a version of Python, with these packages.
check() {
    local venv=.venv-$1 newest=$2
    shift 2
    environment "$venv" "${PYTHON:-python3}" 3.10 "$newest" "$venv/bin/python" -m pip install --quiet \
        --only-binary=:all: "$@" 'numpy>=1.24' 'ml_dtypes>=0.4' 'msgpack>=1.0.5' 'msgspec>=0.20' 'pytest>=8'
    if [[ $is_ready == true ]]; then
        # A file of settings that is empty: those of the project name plugins that are not installed here.
        PYTHONPATH=. "$venv/bin/python" -m pytest -q -c /dev/null --rootdir . -p no:cacheprovider "${args[@]}" \
            tests/real_cupy
    fi
}

args=("$@")
check cupy13 3.13 'cupy-cuda12x==13.6.*' nvidia-nccl-cu12 nvidia-cuda-runtime-cu12
check cupy14 3.14 'cupy-cuda13x==14.*' nvidia-nccl-cu13 nvidia-cuda-runtime
