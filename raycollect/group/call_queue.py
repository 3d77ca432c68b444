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

    Ranks match calls by their order alone. If the calls of two threads overlap, their order is luck and differs between
    ranks, which would get each other's results where these look alike. If a thread calls after the calls of another one
    have ended, nothing here can tell whether all ranks keep that order.
    """

    def __init__(self, rank: int) -> None:
        # What is wrong, from the first call of a second thread until all calls have ended
        self.conflict: Violation | None = None
        self._rank = rank
        self._calls: dict[int, int] = {}  # thread -> the number of its calls that have not ended
        self._lock = threading.Lock()

    def enter(self, op: str) -> bool:
        """The calling thread makes a call. Returns whether a conflict begins with it."""
        thread, calls = threading.get_ident(), self._calls
        with self._lock:
            known = calls.get(thread, 0)
            calls[thread] = known + 1
            if known or len(calls) == 1 or self.conflict is not None:
                return False
            other = next(one for one in calls if one != thread)
            found = (
                f"{threading.current_thread().name!r}, which calls {op} while a call of {_name(other)} has not ended"
            )
            expected = "the thread of the calls that have not ended"
            self.conflict = Violation(
                kind="concurrent", rank=self._rank, field="thread", found=found, expected=expected
            )
            return True

    def leave(self, thread: int) -> None:
        """A call of a thread has ended."""
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
    return next((repr(one.name) for one in threading.enumerate() if one.ident == thread), "a thread that has ended")


class CallQueue:
    """Runs queued calls one by one in a thread that starts with the first; `pending` is how many have not ended.

    Args:
        name: The communicator, for the name of the thread.
        broken: Returns why its ranks can't communicate any more; None if they can.
    """

    def __init__(self, name: str, broken: Callable[[], RaycollectError | None]) -> None:
        self.pending: int = 0
        self._name = name
        self._broken = broken
        self._changed = threading.Condition()
        self._queue: deque[tuple[Future[Outcome], Callable[[], Outcome], Callable[[], object]]] = deque()
        self._worker: threading.Thread | None = None
        self._closed = False

    def submit(self, run: Callable[[], Outcome], ended: Callable[[], object] = lambda: None) -> Future[Outcome]:
        """Queues a call; `ended` is called when it has ended, before its outcome is known."""
        future: Future[Outcome] = Future()
        with self._changed:
            if self._closed:  # its thread may have ended
                closed = InternalError(detail="a call on a communicator that was closed")
                future.set_exception(copy_error(self._broken() or closed))
                ended()
                return future
            if self._worker is None:  # first, so that nothing is queued if no thread can be started
                self._worker = threads.start(f"raycollect-call-{self._name}", threads.repeat, self._take)
            self._queue.append((future, run, ended))
            self.pending += 1
            self._changed.notify_all()
        return future

    def close(self) -> None:
        """Ends the thread after the calls that are queued."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()

    def drain(self, timeout_s: float) -> bool:
        """Waits for the calls that are queued; False if some are left. In the queue's own thread it does not wait."""
        with self._changed:
            limit_s = 0.0 if threading.current_thread() is self._worker else timeout_s
            return self._changed.wait_for(lambda: not self.pending, limit_s)

    def _take(self) -> bool:
        with self._changed:
            self._changed.wait_for(lambda: self._queue or self._closed)
            if not self._queue:
                return False
            future, run, ended = self._queue.popleft()
        tell: Callable[[], None]
        try:
            tell = partial(future.set_result, run())
        except RaycollectError as exc:
            tell = partial(future.set_exception, strip_traceback(exc))
        except BaseException as exc:  # noqa: BLE001 - whoever waits gets it
            tell = partial(future.set_exception, threads.failed(f"a call on communicator {self._name}", exc))
        with self._changed:
            self.pending -= 1
            self._changed.notify_all()
        ended()
        tell()  # after this the next call may come, from any thread
        return True
