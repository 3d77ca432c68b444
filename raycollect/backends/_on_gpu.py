"""What communicators share whose rank works on one GPU: what they refuse before anything is enqueued."""

from __future__ import annotations

from raycollect.contracts import Exchange
from raycollect.errors import RaycollectError, Violation, refusal
from raycollect.model import GroupSpec, Kernel, Launch, ReduceOp

from ._exchanged import Exchanged
from .device_arrays import DeviceArray

__all__ = ["OnGpu"]


class OnGpu(Exchanged):
    """The part of a communicator that knows its GPU; see `raycollect.contracts.Communicator`.

    Attributes:
        device: On which it works: ``"cuda:0"``.
    """

    def __init__(self, spec: GroupSpec, rank: int, exchange: Exchange, number: int) -> None:
        super().__init__(spec, rank, exchange)
        self.device: str = f"cuda:{number}"

    def stage(self, launch: Launch, kernel: Kernel) -> None:
        """Refuses arrays that lie elsewhere than on this rank's GPU, or that cannot be reduced.

        Raises:
            UnsupportedError: See above.
        """
        name = type(self).__name__
        if kernel.memo.get(name) == self.device:
            return  # it was looked at before
        if stray := _stray_device(kernel, self.device):
            expected = f"{self.device}, where this rank of the group works; others go by shm and tcp"
            raise self._refused(kernel, "device", stray, expected)
        if kernel.op is not None and kernel.sample is not None:
            dtype = kernel.sample.dtype.name
            if expected := self._other_than(kernel.op, dtype):
                raise self._refused(kernel, "reduce op", f"{kernel.op.name} of {dtype}", expected)
        kernel.memo[name] = self.device  # not this object, which it would keep

    def _other_than(self, op: ReduceOp, dtype: str) -> str:
        """What to take instead where a dtype can't be reduced so; empty where it can."""
        raise NotImplementedError

    def _refused(self, kernel: Kernel, field: str, found: str, expected: str) -> RaycollectError:
        violation = Violation(kind="unsupported", rank=self.rank, field=field, found=found, expected=expected)
        return refusal(kernel.kind.value, self._group_name, (violation,))


def _stray_device(kernel: Kernel, device: str) -> str:
    """Where the first array of a kernel lies that does not lie on a device: ``"cpu"``, ``"cuda:1"``; empty for none."""
    for side in (kernel.src, kernel.dst):
        for array in side if type(side) is tuple else (() if side is None else (side,)):
            found = array.device if isinstance(array, DeviceArray) else "cpu"
            if found != device:
                return found
    return ""
