#!/usr/bin/env bash
# Installs what verl's checkpoint engines need on a CPU into an environment of its own (1.5 GB, of which torch takes half;
# 1 to 5 minutes), and runs the tests of raycollect.verl in it, in less than a minute. Where the packages can't be had,
# as on Python 3.13, it says so and ends well. torch has to be that for CPUs: tests/vllm.sh says how.
#
#   bash tests/verl.sh [ARGS OF PYTEST]
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

venv=.venv-verl
install() {
    "$venv/bin/python" -m pip install --quiet --only-binary=torch --editable '.[verl]'
    # Its other dependencies train models, and are not imported here.
    "$venv/bin/python" -m pip install --quiet --no-deps verl==0.9.1
}

if [[ ! -f $venv/.installed || pyproject.toml -nt $venv/.installed || tests/verl.sh -nt $venv/.installed ]]; then
    "${PYTHON:-python3}" -m venv --clear "$venv"
    if ! install >"$venv/pip.log" 2>&1; then
        echo "verl was not tested: its packages can't be had here: $(tail -n 1 "$venv/pip.log")"
        exit
    fi
    touch "$venv/.installed"
fi
# verl's dependencies warn of each other.
"$venv/bin/python" -m pytest -W default -m "full or not full" "$@" tests/verl
