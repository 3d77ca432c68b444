"""The controller's connection to one leased participant."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from contextlib import suppress
from functools import partial
from typing import Any, ClassVar, Protocol
from weakref import ref

from raycollect.channel import ControlLink
from raycollect.channel.mailbox import IN_ORDER, Letters, Slot
from raycollect.channel.messages import (
    Collected,
    Keeps,
    Measured,
    Message,
    Order,
    Refused,
    Seen,
    Surveyed,
    Ticked,
    Unable,
    Unused,
    Welcome,
)
from raycollect.core import threads
from raycollect.core.model import Key
from raycollect.core.signals import waiting
from raycollect.driver.plan_tracker import PlanTracker
from raycollect.errors import (
    ChannelError,
    CollectiveTimeoutError,
    ConnectionLostError,
    DispatchError,
    ParticipantDiedError,
    ProtocolError,
    RaycollectError,
    copy_error,
    from_wire,
    strip_traceback,
)
from raycollect.member import participant
from raycollect.pos import fetch
from raycollect.ray_bridge import direct_transport
from raycollect.ray_bridge.call_tokens import CallTokens
from raycollect.ray_bridge.submitted_calls import NOTHING, SubmittedCalls, expect_retries

_ANSWERS = Surveyed, Seen, Measured, Ticked, Unable

MOST_COLLECTED_NBYTES = 128 << 20  # more than the largest ring of a participant takes
MOST_METHODS = 1024  # how many methods of an actor are lent tokens; the others make their own


class LinkOwner(Protocol):
    """Receives messages of participants, and the ends of their connections; all but `parted` on the hub's thread."""

    def received(self, peer: ParticipantLink, message: Any) -> None:
        """A message of a participant."""

    def lost(self, peer: ParticipantLink, reason: str) -> None:
        """A participant's connection has ended."""

    def parted(self, peer: ParticipantLink) -> None:
        """The calling thread has ended a participant's lease: the participant aborts its plans, without a report."""


class ParticipantLink:
    """One leased participant.

    Attributes:
        is_here: Whether it is this process.
        is_lost: Whether its connection has ended.
        has_mailbox: Whether it takes letters from the controller's mailbox; None: it has not answered yet.
    """

    is_here: ClassVar[bool] = False

    def __init__(
        self,
        owner: LinkOwner,
        info: dict[str, Any],
        actor: Any,
        *,
        controller_id: str = "",
        calls: SubmittedCalls | None = None,
    ) -> None:
        self.info = info
        self.actor: Any = actor
        self.calls: SubmittedCalls | None = calls  # None: plans in program order have to be actor tasks
        if calls is not None:
            expect_retries(info["actor_id"])
            with calls.lock:  # another process may have been leased before, whose calls Ray may run here again
                calls.last, calls.before = None, None
        self._controller_id = controller_id
        self.last_seq = 0
        self.slot: Slot | None = None  # in the controller's mailbox
        self.group_ids: set[str] = set()
        self.link: ControlLink | None = None
        self._owner = owner
        self._answer: RaycollectError | None = None
        self.has_mailbox: bool | None = None
        self._answered = threading.Event()
        self._tasks: dict[tuple[str, int], Any] = {}
        self._requests = itertools.count(1)
        self._questions: dict[int, Future[Any]] = {}
        self._collected: dict[int, bytearray] = {}  # the parts so far of long answers
        self.is_lost: bool = False
        self._tokens: CallTokens | None = None  # lent to the calls of its methods (P5)
        self._keeping: set[str] = set()  # its methods that have returned tensors
        self._run = () if info["participant"] else (participant.run_program,)

    def task(self, name: str, returns: int) -> Any:
        """A method of the actor, to be submitted as a task of the package; None after the end of the lease."""
        method, actor = self._tasks.get((name, returns)), self.actor
        if method is None and actor is not None:
            # Not retried: a second run would work on data that the first has changed. No task events: they cost 3 % of
            # a small plan, and the recorder knows more of it than Ray's dashboard could.
            method = getattr(actor, name)
            method = method.options(num_returns=returns, max_task_retries=0, enable_task_events=False)
            self._tasks[name, returns] = method
        return method

    def submit(self, payload: bytes, outputs: int, behind: Sequence[Any] = ()) -> list[Any]:
        """Submits a program as one actor task, which Ray begins once the refs in `behind` have values.

        Returns:
            The refs of its outputs.
        """
        calls = self.calls
        method = self.task("__ray_call__" if self._run else "_raycollect_run", outputs)
        if calls is None:
            refs = method.remote(*self._run, payload, *behind)
        else:
            with calls.lock:
                refs = method.remote(payload, *behind)
                calls.last, calls.before = NOTHING, None  # the plans after it wait for it, and methods are behind it
        return [] if refs is None else refs if isinstance(refs, list) else [refs]

    def submit_behind(self, payload: bytes, outputs: int, behind: Sequence[Any]) -> list[Any]:
        """`submit`; if one of `behind` fails for good, Ray never begins the task, and `order` sends the program."""
        refs = self.submit(payload, outputs, behind)
        waiting = [Order(payload=payload, in_order=False, after=NOTHING)]

        def settled(value: Any) -> None:
            if isinstance(value, Exception):
                with suppress(
                    IndexError, ConnectionLostError
                ):  # another one has failed before; the participant is gone
                    self.order(waiting.pop())

        for operand in behind:
            direct_transport.on_completed(operand, settled)
        return refs

    def submit_in_order(self, payload: bytes, tracker: PlanTracker, position: int, letters: Letters | None) -> None:
        """Sends a program without outputs, to run where an actor task would, or as an actor task.

        Args:
            payload: The program with its ticket.
            tracker: Its plan.
            position: The participant's position there.
            letters: To which a letter is added where it goes by the mailbox.
        """
        calls = self.calls
        if calls is None:
            self.submit(payload, 0)
            return
        with calls.lock:
            if calls.last is None:
                self.submit(payload, 0)
                return
            self.keep_behind(ref(tracker), position)
            self.order(Order(payload=payload, in_order=True, after=calls.last), letters)

    def keep_behind(self, tracker: ref[PlanTracker], position: int) -> None:
        """Keeps later calls of the actor behind a plan, or a run; the caller holds the lock of `calls`."""
        if self.calls is not None:
            self.calls.before = partial(_keep_behind, tracker, position, ref(self))

    def fence(self, seq: int) -> None:
        """Submits an actor task that lets a plan begin, and ends with the plan; none after the end of the lease."""
        method = self.task("_raycollect_fence", 0)
        if method is not None:
            method.remote(self._controller_id, seq)

    def lend_tokens(self, owner: bytes, soon: Callable[[Callable[[], None]], bool]) -> None:
        """Lends tokens to the calls of methods that return tensors, from now on; see `CallTokens`."""
        if self.calls is not None and self.link is not None:
            order, tell = partial(_order_tokens, self.actor), partial(_tell_unused, self.link, self.info, owner)
            self._tokens = self.calls.tokens = CallTokens(self.actor, owner, self._keeping, order, tell, soon)

    def _end_tokens(self, call: Callable[[], None]) -> None:
        """Stops lending tokens; makes a call once no process holds a value whose token was lent."""
        tokens, self._tokens = self._tokens, None
        if self.calls is not None and self.calls.tokens is tokens:  # else the actor was leased again
            self.calls.tokens = None
        if tokens is None:
            call()
        else:
            tokens.end(call)

    def retire(self) -> None:
        """Ends the lease; the connection ends once no process holds a value whose token was lent."""
        link, self.actor = self.link, None  # so that the actor may end
        self.slot = None
        self._tasks.clear()
        if link is not None:
            self._end_tokens(link.close)
        self._end_questions()

    def order(self, message: Order, letters: Letters | None = None) -> None:
        """Sends a program past the methods in the actor's queue: as one of some letters, or by the channel."""
        link, slot = self.link, self.slot
        if link is None or self.is_lost:
            raise ConnectionLostError(detail="its connection has ended")
        flags = IN_ORDER if message.in_order else 0
        if letters is None or slot is None or not slot.write(letters, message.after, message.payload, flags):
            link.send(message)

    def unsent(self, exc: Exception, rank: int) -> RaycollectError:
        """The error of a message that could not be sent to it, because of `exc`."""
        actor = self.info["actor"]
        error: RaycollectError
        if isinstance(exc, ConnectionLostError):
            error = ParticipantDiedError(rank=rank, actor=actor, detail=f"it got no order ({exc.detail})")
        else:
            error = DispatchError(rank=rank, actor=actor, detail=f"{type(exc).__name__}: {exc}")
        error.__cause__ = exc
        return strip_traceback(error)

    def welcome(self, timeout_s: float) -> bool:
        """Waits for the answer to the lease; returns whether the participant takes letters from the mailbox.

        Raises:
            ControllerConflictError: Another process drives it.
            CollectiveTimeoutError: It has not answered in time.
        """
        if not waiting(self._answered.wait, timeout_s):
            raise CollectiveTimeoutError(
                op="lease", actor=self.info["actor"], detail="the actor gave no answer in time"
            )
        if self._answer is not None:
            raise copy_error(self._answer)
        return self.has_mailbox is True

    def ask(self, question: Callable[..., Message], **fields: Any) -> Future[Any]:
        """Asks for something; `question` is the message, and `fields` are all of its fields but the request.

        The result is the answer, or None where the connection ends first; for `Collect` the bytes of all its parts, or
        an `Unable`.
        """
        request, future = next(self._requests), Future[Any]()
        self._questions[request] = future
        self.send(question(request=request, **fields))
        if self.is_lost or self.actor is None:  # it answers nothing after its lease
            self._end_questions()
        return future

    def _end_questions(self) -> None:
        self._collected.clear()
        for request in list(self._questions):
            self._answered_by(request, None)

    def _collect_part(self, message: Collected) -> None:
        if message.request not in self._questions:
            return
        parts = self._collected.setdefault(message.request, bytearray())
        parts += message.payload
        if len(parts) > MOST_COLLECTED_NBYTES:
            raise ProtocolError(detail=f"a timeline of more than {MOST_COLLECTED_NBYTES} bytes")
        if not message.more:
            self._answered_by(message.request, bytes(parts))

    def _answered_by(self, request: int, answer: Surveyed | Seen | Measured | Ticked | Unable | bytes | None) -> None:
        self._collected.pop(request, None)
        future = self._questions.pop(request, None)
        if future is not None:
            future.set_result(answer)

    def received(self, link: ControlLink, message: Any) -> None:
        """A message of the participant; on the hub's thread."""
        if isinstance(message, (Welcome, Refused)):
            self._answer = from_wire(message.error) if isinstance(message, Refused) else None
            self.has_mailbox = isinstance(message, Welcome) and message.has_mailbox
            self._answered.set()
        elif isinstance(message, Collected):
            self._collect_part(message)
        elif isinstance(message, _ANSWERS):
            self._answered_by(message.request, message)
        elif isinstance(message, Keeps):
            if len(self._keeping) < MOST_METHODS:
                self._keeping.add(message.method)
        else:
            self._owner.received(self, message)

    def closed(self, link: ControlLink, reason: ChannelError) -> None:
        """The connection has ended; on the hub's thread."""
        if self.is_lost:
            return
        if not self._answered.is_set():
            self._answer = strip_traceback(reason)
            self._answered.set()
        self.is_lost = True
        threads.survives(self._end_tokens, lambda: None)
        threads.survives(self._end_questions)
        self._owner.lost(self, reason.detail)

    def send(self, message: Any) -> None:
        """Sends a message; `closed` deals with a link that has ended."""
        try:
            if self.link is not None:
                self.link.send(message)
        except ConnectionLostError:
            pass


def _order_tokens(actor: Any, count: int) -> list[Any]:
    """Has an actor make tokens; `CallTokens` drops this, and with it the actor, when it ends."""
    method = actor._raycollect_tokens
    return list(method.options(num_returns=count, max_task_retries=0, enable_task_events=False).remote(count))


def _tell_unused(link: ControlLink, info: dict[str, Any], owner: bytes, keys: list[Key]) -> None:
    """Tells a participant that no process holds the values of keys with tokens of `owner` any more."""
    try:
        for at in range(0, len(keys), fetch.FREED_AT_ONCE):
            link.send(Unused(keys=[*keys[at : at + fetch.FREED_AT_ONCE]]))
    except ConnectionLostError:  # the participant may live: then it holds them until it hears
        threads.call_in_helper(
            threads.survives, _free, info, owner, keys
        )  # that thread must not hold refs as Ray is shut down


def _free(info: dict[str, Any], owner: bytes, keys: list[Key]) -> None:
    """Frees values over a connection of its own."""
    with suppress(RaycollectError):  # its process has ended
        fetch.free(info["address"], keys, actor=info["actor"], incarnation=info["incarnation"], owner=owner)


def _keep_behind(tracker: ref[PlanTracker], position: int, link: ref[ParticipantLink]) -> None:
    """Keeps later calls of the actor behind a plan that is under way there."""
    plan, here = tracker(), link()
    if plan is not None and here is not None and plan.is_pending(position):
        here.fence(plan.seq)
