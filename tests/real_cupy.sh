#!/usr/bin/env bash
# Installs the real cupy and NCCL into environments of their own, and checks the fake and the backend against
# them. None of it needs a GPU. Where the packages can't be had, it says so and ends well.
#
#   bash tests/real_cupy.sh [ARGS OF PYTEST]
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

python=${PYTHON:-python3}
# name of the environment -> what is installed there
declare -A packages=(
    [cupy13]="cupy-cuda12x==13.6.* nvidia-nccl-cu12 nvidia-cuda-runtime-cu12"
    [cupy14]="cupy-cuda13x==14.* nvidia-nccl-cu13 nvidia-cuda-runtime"
)

for name in cupy13 cupy14; do
    venv=.venv-$name
    if [[ ! -f $venv/.installed || pyproject.toml -nt $venv/.installed || tests/real_cupy.sh -nt $venv/.installed ]]; then
        echo "installing ${packages[$name]} into $venv"
        "$python" -m venv --clear "$venv"
        # shellcheck disable=SC2086
        if ! "$venv/bin/python" -m pip install --quiet --only-binary=:all: \
            ${packages[$name]} 'numpy>=1.24' 'ml_dtypes>=0.4' 'msgpack>=1.0.5' 'msgspec>=0.20' 'pytest>=8' >"$venv/pip.log" 2>&1; then
            echo "the real $name was not checked: its packages can't be had here: $(tail -n 1 "$venv/pip.log")"
            continue
        fi
        touch "$venv/.installed"
    fi
    # A file of settings that is empty: those of the project name plugins that are not installed here.
    PYTHONPATH=. "$venv/bin/python" -m pytest -q -c /dev/null --rootdir . -p no:cacheprovider "$@" tests/real_cupy
done
