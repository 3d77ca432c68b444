"""Torch's handles of a call: its `Work`, and futures that can fail."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future
from datetime import timedelta
from importlib import import_module
from typing import Any

from raycollect.errors import RaycollectError, copy_error
from raycollect.member.work import MemberWork

torch: Any = import_module("torch")
distributed: Any = import_module("torch.distributed")


def future_of(tensors: Sequence[Any]) -> Any:
    """A `torch.futures.Future` for tensors on any devices; its callbacks run on streams of those that are GPUs."""
    return torch.futures.Future(devices=list({tensor.device for tensor in tensors if tensor.is_cuda}))


class _Failed:
    """The value of a failed torch future: reading it raises the error.

    `torch.futures.Future.set_exception` makes the error the value, for Python to raise. DDP reads the value in C++: it
    extracts the tensors by pickling, and accesses the first one, with a SIGSEGV if there are no tensors.
    """

    def __init__(self, error: BaseException) -> None:
        self._error = error

    def look(self) -> Any:
        """Raises the error; the function with which a future unwraps its value."""
        if isinstance(self._error, RaycollectError):
            raise copy_error(self._error)
        raise self._error.with_traceback(None)

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self.look()


class TorchWork(distributed.Work):  # type: ignore[misc]
    """Torch's handle of a call; `tensors` are the arguments of the call."""

    def __init__(self, work: MemberWork, future: Future[Any], tensors: Sequence[Any], source: int = -1) -> None:
        super().__init__()
        self._work = work
        self._future = future
        self._tensors = list(tensors)
        self._source = source

    def wait(self, timeout: timedelta = timedelta(0)) -> bool:
        """Waits for the end; a timeout of zero means as long as the call itself may last. Raises as `MemberWork`."""
        self._work.wait(timeout.total_seconds() or None)
        return True

    def get_future(self) -> Any:
        """A `torch.futures.Future` of the tensors, set at the end of the call."""
        tensors = self._tensors
        torch_future = future_of(tensors)

        def settle(future: Future[Any]) -> None:
            error = future.exception()
            if error is not None:
                torch_future._set_unwrap_func(_Failed.look)
            torch_future.set_result(tensors if error is None else _Failed(error))

        self._future.add_done_callback(settle)
        return torch_future

    def is_completed(self) -> bool:
        """Whether the call has ended; never waits."""
        return self._future.done()

    def is_success(self) -> bool:
        """Whether the call has succeeded."""
        return self.is_completed() and self.exception() is None

    def exception(self) -> BaseException | None:
        """The error of the call; None if it succeeded, or has not ended."""
        return self._future.exception() if self._future.done() else None

    def result(self) -> list[Any]:
        """The tensors."""
        return self._tensors

    def _source_rank(self) -> int:
        return self._source
