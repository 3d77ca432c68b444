"""Plans of groups with ``ordering="data"``: they come over the channel, past the methods in the actor's queue.

They run one after the other, on a thread of their own, each between two methods where the actor's methods come one by
one. Who begins a plan so holds up the methods of its actor until the others have come; so nobody begins before it has
its operands, and where a participant may have to wait for these, not before all have theirs.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from queue import SimpleQueue
from typing import Any

from raycollect.channel.messages import Go, Message, Order, Ready, Waiting
from raycollect.errors import GroupBrokenError, PlanAbortedError
from raycollect.ledger import Ledger
from raycollect.model import Key
from raycollect.planner import decode_order
from raycollect.pos import Absence, State, Store

__all__ = ["Orders"]

log: logging.Logger = logging.getLogger("raycollect")


class Orders:
    """The orders that have come to this participant. Any thread may call it.

    Args:
        store: Where operands are.
        turn: Held by methods that Ray calls, where these come one by one.
        tell: Sends to the controller, if there is one.
        run: Carries out an order; raises GroupBrokenError where its controller is gone.
    """

    def __init__(
        self, store: Store, turn: threading.Lock, tell: Callable[[Message], None], run: Callable[[Order], object]
    ) -> None:
        self._store = store
        self._turn = turn
        self._tell = tell
        self._run = run
        self._waiting: SimpleQueue[Order | None] = SimpleQueue()  # None: no more will come
        self._thread: threading.Thread | None = None
        self._going = threading.Condition()
        self._cleared = 0  # the plan of the latest `Go`

    def received(self, message: Order) -> None:
        """An order came; on the channel's thread.

        Raises:
            ProtocolError: It is malformed.
        """
        decode_order(message.payload)  # what it gives is remembered
        self._waiting.put(message)
        if self._thread is None:
            self._thread = threading.Thread(target=self._work, name="raycollect-order", daemon=True)
            self._thread.start()

    def go(self, message: Go) -> None:
        """All participants of a plan are ready; on the channel's thread."""
        with self._going:
            self._cleared = message.seq
            self._going.notify_all()

    def wake(self) -> None:
        """A plan was aborted: who waits looks whether it is the one."""
        with self._going:
            self._going.notify_all()

    def close(self) -> None:
        """Ends the thread, after what has come; the ledger has refused that by now."""
        self._waiting.put(None)
        self.wake()

    def between_methods(
        self, order: Order, seq: int, keys: Sequence[Key], ledger: Ledger, timeout_s: float, *, is_ordered: bool
    ) -> AbstractContextManager[Any]:
        """Waits for all that a plan needs; gives the time in which no method runs, where methods come one by one.

        Args:
            order: What brought it.
            seq: The plan.
            keys: Its operands.
            ledger: Knows whether it was aborted.
            timeout_s: How long to wait for the others.
            is_ordered: Whether methods come one by one.

        Raises:
            PlanAbortedError: The plan was aborted meanwhile.
        """
        for key in keys:
            found = self._store.look(key)
            if isinstance(found, Absence) and found.state is State.ABSENT:
                self._tell(Waiting(seq=seq, key=key))
                self._store.wait(key, lambda: ledger.reason(seq) is not None)
        if order.together:
            self._tell(Ready(seq=seq, late=False))
            with self._going:
                late = not self._going.wait_for(lambda: self._may_go(seq, ledger), timeout_s)
            if late:
                self._tell(Ready(seq=seq, late=True))  # the controller knows for whom, and ends the plan
                with self._going:
                    self._going.wait_for(lambda: self._may_go(seq, ledger))
        reason = ledger.reason(seq)
        if reason is not None:
            raise PlanAbortedError(detail=reason)
        return self._turn if is_ordered else nullcontext()

    def _may_go(self, seq: int, ledger: Ledger) -> bool:
        return self._cleared == seq or ledger.reason(seq) is not None

    def _work(self) -> None:
        while True:
            order = self._waiting.get()
            if order is None:
                return
            try:
                self._run(order)
            except GroupBrokenError:
                pass  # its controller is gone
            except Exception:
                log.exception("an order of the controller could not be carried out")
