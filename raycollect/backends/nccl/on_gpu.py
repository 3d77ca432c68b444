"""The common base of communicators that work on one GPU: checks before anything is enqueued."""

from __future__ import annotations

from raycollect.backends.device_arrays import DeviceArray
from raycollect.backends.exchanged import Exchanged
from raycollect.core.model import Kernel, Launch, ReduceOp
from raycollect.core.protocols import Joining


class OnGpu(Exchanged):
    """The part of a `Communicator` that knows its GPU."""

    def __init__(self, joining: Joining, number: int) -> None:
        super().__init__(joining)
        self.device: str = f"cuda:{number}"  # ``"cuda:0"``

    def _check_kernel(self, launch: Launch, kernel: Kernel) -> None:
        # Raises UnsupportedError for arrays that are not on this rank's GPU, or can't be reduced.
        name = type(self).__name__
        if kernel.memo.get(name) == self.device:
            return  # checked before
        if stray := _stray_device(kernel, self.device):
            expected = f"{self.device}, the device of this rank of the group; shm and tcp take others"
            raise self._refused(kernel, "device", stray, expected)
        if kernel.op is not None and kernel.sample is not None:
            dtype = kernel.sample.dtype.name
            if expected := self._other_than(kernel.op, dtype):
                raise self._refused(kernel, "reduce op", f"{kernel.op.name} of {dtype}", expected)
        kernel.memo[name] = self.device  # not this object: the memo would keep it alive

    def _other_than(self, op: ReduceOp, dtype: str) -> str:
        # The supported alternative if a dtype can't be reduced so; empty if it can.
        raise NotImplementedError


def _stray_device(kernel: Kernel, device: str) -> str:
    # The device of the first array on another device: ``"cpu"``, ``"cuda:1"``; empty if all are on `device`.
    for side in (kernel.src, kernel.dst):
        for array in side if type(side) is tuple else (() if side is None else (side,)):
            actual = array.device if isinstance(array, DeviceArray) else "cpu"
            if actual != device:
                return actual
    return ""
