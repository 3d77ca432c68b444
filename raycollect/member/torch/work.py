"""What torch gets for a call: its `Work`, and futures that can fail."""

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


class _Failed:
    """The value of a torch future that has failed: who reads it gets the error.

    `torch.futures.Future.set_exception` makes the error itself the value, for Python to raise. DDP reads the value in
    C++: it takes the tensors out of it by pickling, looks at the first, and dies of SIGSEGV where there is none.
    """

    def __init__(self, error: BaseException) -> None:
        self._error = error

    def look(self) -> Any:
        """Raises the error; what a future does with its value."""
        if isinstance(self._error, RaycollectError):
            raise copy_error(self._error)
        raise self._error.with_traceback(None)

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self.look()


class TorchWork(distributed.Work):  # type: ignore[misc]
    """A call under way, as torch sees it; `tensors` are those that the call was given."""

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
        """Its end as a `torch.futures.Future` of the tensors."""
        made, tensors = torch.futures.Future(), self._tensors

        def settle(future: Future[Any]) -> None:
            error = future.exception()
            if error is not None:
                made._set_unwrap_func(_Failed.look)
            made.set_result(tensors if error is None else _Failed(error))

        self._future.add_done_callback(settle)
        return made

    def is_completed(self) -> bool:
        """Whether it has ended; never waits."""
        return self._future.done()

    def is_success(self) -> bool:
        """Whether it has ended well."""
        return self.is_completed() and self.exception() is None

    def exception(self) -> BaseException | None:
        """Why it failed; None if it did not, or has not ended."""
        return self._future.exception() if self._future.done() else None

    def result(self) -> list[Any]:
        """The tensors."""
        return self._tensors

    def _source_rank(self) -> int:
        return self._source
