"""The calls of one communicator that run in its own thread, and the check that no two threads call at once."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from functools import partial

from raycollect.core import threads
from raycollect.engine.run import Outcome
from raycollect.errors import InternalError, RaycollectError, Violation, copy_error, strip_traceback


class Callers:
    """The threads whose calls on one communicator have not ended. Any thread may call it.

    Ranks match calls by their order alone. If the calls of two threads overlap, their order is arbitrary and differs
    between ranks: ranks would get the results of other calls of the same shape. If a thread calls after the calls of
    another thread have ended, the communicator can't check that all ranks keep that order.
    """

    def __init__(self, rank: int) -> None:
        # The violation, from the first call of a second thread until all calls have ended
        self.conflict: Violation | None = None
        self._rank = rank
        self._calls: dict[int, int] = {}  # thread -> the number of its calls that have not ended
        self._lock = threading.Lock()

    def enter(self, op: str) -> bool:
        """Registers a call of this thread. Returns whether a conflict begins with it."""
        thread, calls = threading.get_ident(), self._calls
        with self._lock:
            own = calls.get(thread, 0)
            calls[thread] = own + 1
            if own or len(calls) == 1 or self.conflict is not None:
                return False
            other = next(ident for ident in calls if ident != thread)
            actual = (
                f"{threading.current_thread().name!r}, which calls {op} while a call of {_name(other)} has not ended"
            )
            expected = "the thread of the calls that have not ended"
            self.conflict = Violation(
                kind="concurrent", rank=self._rank, field="thread", found=actual, expected=expected
            )
            return True

    def leave(self, thread: int) -> None:
        """Unregisters a call of a thread."""
        calls = self._calls
        with self._lock:
            left = calls[thread] - 1
            if left:
                calls[thread] = left
                return
            del calls[thread]
            if not calls:
                self.conflict = None


def _name(thread: int) -> str:
    return next(
        (repr(candidate.name) for candidate in threading.enumerate() if candidate.ident == thread),
        "a thread that has ended",
    )


class CallQueue:
    """Runs queued calls one by one in a thread, which the first call starts.

    Args:
        name: The communicator, for the name of the thread.
        broken: Returns the error of a broken communicator; None if its ranks can communicate.

    Attributes:
        pending: The number of calls that have not ended.
        is_busy: Whether a call has not ended, or the thread still refers to its tensors.
    """

    def __init__(self, name: str, broken: Callable[[], RaycollectError | None]) -> None:
        self.pending: int = 0
        self.is_busy: bool = False
        self._name = name
        self._broken = broken
        self._changed = threading.Condition()
        self._queue: deque[tuple[Future[Outcome], Callable[[], Outcome], Callable[[], object]]] = deque()
        self._worker: threading.Thread | None = None
        self._closed = False

    def submit(self, run: Callable[[], Outcome], ended: Callable[[], object] = lambda: None) -> Future[Outcome]:
        """Queues a call; `ended` is called after its end, before the future is set."""
        future: Future[Outcome] = Future()
        with self._changed:
            if self._closed:  # its thread may have ended
                closed = InternalError(detail="a call on a communicator that was closed")
                future.set_exception(copy_error(self._broken() or closed))
                ended()
                return future
            if self._worker is None:  # before queueing: starting a thread may fail
                self._worker = threads.start(f"raycollect-call-{self._name}", threads.repeat, self._take)
            self._queue.append((future, run, ended))
            self.pending += 1
            self.is_busy = True
            self._changed.notify_all()
        return future

    def close(self) -> None:
        """Ends the thread after the queued calls."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()

    def drain(self, timeout_s: float | None = None) -> bool:
        """Waits for the queued calls; False if some are left. Returns at once in the queue's own thread."""
        with self._changed:
            limit_s = 0.0 if threading.current_thread() is self._worker else timeout_s
            self._changed.wait_for(lambda: not self.is_busy, limit_s)
            return not self.pending

    def _take(self) -> bool:
        with self._changed:
            self._changed.wait_for(lambda: self._queue or self._closed)
            if not self._queue:
                return False
        self._make_first()
        with self._changed:
            self.is_busy = self.pending > 0
            self._changed.notify_all()
        return True

    def _make_first(self) -> None:
        future, run, ended = self._queue.popleft()
        tell: Callable[[], None]
        try:
            tell = partial(future.set_result, run())
        except RaycollectError as exc:
            tell = partial(future.set_exception, strip_traceback(exc))
        except BaseException as exc:  # noqa: BLE001 - the future's waiter gets it
            tell = partial(future.set_exception, threads.failed(f"a call on communicator {self._name}", exc))
        ended()  # before the next call of a thread that drains
        with self._changed:
            self.pending -= 1
        tell()  # last: its waiter may make the next call, in any thread
