#!/usr/bin/env bash
# Installs what verl's checkpoint engines need on a CPU into an environment of its own (1.5 GB, of which torch takes half;
# 1 to 5 minutes), and runs the tests of raycollect.verl in it, in about a minute. tests/environment.sh says where it does
# not. torch has to be that for CPUs: tests/vllm.sh says how.
#
#   bash tests/verl.sh [ARGS OF PYTEST]
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
source tests/environment.sh

venv=.venv-verl
install() {
    "$venv/bin/python" -m pip install --quiet --only-binary=torch --editable '.[verl]' &&
        # Its other dependencies train models, and are not imported here.
        "$venv/bin/python" -m pip install --quiet --no-deps verl==0.9.1
}

environment "$venv" "${PYTHON:-python3}" 3.10 3.12 install
if [[ $is_ready == true ]]; then
    # verl's dependencies warn of each other.
    "$venv/bin/python" -m pytest -W default -m "full or not full" "$@" tests/verl
fi
