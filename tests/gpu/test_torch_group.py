"""torch's process group of raycollect with CUDA tensors; on the fake, which has none, its program with CPU tensors."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("torch.distributed")
pytest.importorskip("msgpack", reason="raycollect needs msgpack")

from . import devices

PROGRAM = Path(__file__).with_name("torch_program.py")
WAIT_S = 100


@pytest.mark.parametrize("backend", ["shm", "tcp", "nccl"])
def test_a_process_group_of_two_ranks(backend: str) -> None:
    if not devices.FAKE:
        devices.need("torch")
    if backend == "nccl" and (why := devices.why_no_torch() or why_not_two()):
        pytest.skip(why)
    run = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", PROGRAM, backend]
    paths = os.pathsep.join(filter(None, [str(PROGRAM.parents[2]), os.environ.get("PYTHONPATH")]))
    environment = os.environ | devices.environment_of(0) | {"PYTHONPATH": paths, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(run, capture_output=True, text=True, timeout=WAIT_S, check=False, env=environment)
    assert done.returncode == 0, done.stderr[-4000:]
    assert done.stdout.count(" right") == 6


def why_not_two() -> str:
    """Why NCCL can't connect two processes that say nothing else about their host, or ""."""
    return "its processes are on one host" if devices.AS_HOSTS else devices.why_not_so_many(2)
