"""What tests of streams share: waits with a limit, kernels of a sum, and what is known of a stream."""

from __future__ import annotations

from typing import Any

from raycollect.backends import arrays
from raycollect.backends.nccl.communicator import NcclCommunicator
from raycollect.core.model import Kernel, Launch, OpKind, ReduceOp
from raycollect.core.protocols import Communicator
from tests.support.values import replace

WAIT_S = 10.0


def patient(launch: Launch) -> Launch:
    """The same in the consistency check, where all come in the end; its own time limit is for what is behind it."""
    return replace(launch, timeout_s=WAIT_S)


def sums(src: Any, dst: Any = None) -> Kernel:
    return Kernel(kind=OpKind.ALLREDUCE, src=src, dst=src if dst is None else dst, op=ReduceOp.SUM)


def stream_of(communicator: Communicator) -> Any:
    assert isinstance(communicator, NcclCommunicator)
    return communicator._stream.stream


def info(*arrays_: Any) -> list[Any]:
    return [arrays.info(array, "cupy") for array in arrays_]
