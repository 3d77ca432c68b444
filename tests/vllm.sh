#!/usr/bin/env bash
# Installs vLLM for CPUs into an environment of its own (4 GB, about 9 minutes on two busy cores), and runs the tests of
# raycollect.vllm in it. It needs Python 3.11 or newer, and torch for CPUs: where pip is not configured for that, set
# PIP_EXTRA_INDEX_URL=https://download.pytorch.org/whl/cpu.
#
#   bash tests/vllm.sh [ARGS OF PYTEST]
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

venv=.venv-vllm
if [[ ! -f $venv/.installed || pyproject.toml -nt $venv/.installed || tests/vllm.sh -nt $venv/.installed ]]; then
    "${PYTHON:-python3}" -m venv --clear "$venv"
    "$venv/bin/python" -m pip install --quiet --editable '.[vllm]'
    # Text alone needs none of these, and those of PyPI are for torch with CUDA: transformers fails to import them.
    "$venv/bin/python" -m pip uninstall --quiet --yes torchvision torchaudio torchcodec
    touch "$venv/.installed"
fi
# vLLM's dependencies warn of each other.
"$venv/bin/python" -m pytest -W default -m "full or not full" "$@" tests/vllm
