"""One participant, as the controller that leases it sees it."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Any, Protocol

from raycollect.channel import Link
from raycollect.channel.messages import (
    Collect,
    Collected,
    Go,
    Look,
    Measure,
    Measured,
    Message,
    Order,
    Ready,
    Record,
    Refused,
    Seen,
    Survey,
    Surveyed,
    Tick,
    Ticked,
    Welcome,
)
from raycollect.errors import (
    ChannelError,
    CollectiveTimeoutError,
    ConnectionLostError,
    ProtocolError,
    RaycollectError,
    from_wire,
)

MOST_COLLECTED_NBYTES = 128 << 20
"""How much a participant may have recorded: more than the largest ring takes."""


class PeerOwner(Protocol):
    """What a peer tells its controller; on the hub's thread."""

    def received(self, peer: Peer, message: Message) -> None:
        """The participant said something."""
        ...

    def lost(self, peer: Peer, reason: str) -> None:
        """Its connection has ended."""
        ...

    def parted(self, peer: Peer) -> None:
        """It was given back; on the thread that did so."""
        ...


class Muster:
    """Where the participants of one plan say that they have all they need for it; then all may begin.

    Who begins a plan holds up the methods of its actor until the others have come. Another one must not wait, directly
    or through its own actor, for one of these methods then: so nobody begins before all have their operands, and have
    ended the plans before.

    Args:
        seq: The plan.
        peers: Its participants, by position.
        late: What to do when a participant has waited for too long; it is given the positions of those who were not
            ready. Called on the hub's thread.
    """

    def __init__(self, seq: int, peers: Sequence[Peer], late: Callable[[tuple[int, ...]], None]) -> None:
        self._seq = seq
        self._peers = tuple(peers)
        self._late = late
        self._missing = {id(peer): at for at, peer in enumerate(peers)}
        for peer in peers:
            peer.musters[seq] = self

    def received(self, peer: Peer, message: Ready) -> None:
        """A participant is ready, or has been so for too long; on the hub's thread."""
        if message.late and self._missing:
            self._late(tuple(self._missing.values()))
        elif self._missing.pop(id(peer), None) is not None and not self._missing:
            for one in self._peers:
                one.send(Go(seq=self._seq))

    def end(self) -> None:
        """Nobody has to wait here any more; any thread may call it."""
        for peer in self._peers:
            peer.musters.pop(self._seq, None)


class Peer:
    """One leased participant.

    Args:
        owner: Who leased it.
        info: What it said of itself (`Runtime.describe`).
        actor: Its actor handle; does not keep the actor alive where the group was derived.
        run: What an actor without the mixin runs programs with; a function of the actor and the program.

    Attributes:
        musters: Plan -> where its participants meet before they begin.
    """

    def __init__(self, owner: PeerOwner, info: dict[str, Any], actor: Any, run: Callable[[Any, bytes], None]) -> None:
        self.info = info
        self.actor = actor
        self.last_seq = 0
        self.group_ids: set[str] = set()
        self.link: Link | None = None
        self.musters: dict[int, Muster] = {}
        self._owner = owner
        self._answer: RaycollectError | None = None
        self._answered = threading.Event()
        self._submits: dict[int, Any] = {}
        self._requests = itertools.count(1)
        self._asked: dict[int, Future[Any]] = {}
        self._collected: dict[int, bytearray] = {}  # parts of answers that have not come to their end
        self._lost = False
        self._run = () if info["participant"] else (run,)

    def submit(self, payload: bytes, outputs: int) -> list[Any]:
        """Submits a program as one actor task; returns the refs of its outputs."""
        method = self._submits.get(outputs)
        if method is None:
            # Not retried: a second run would work on data that the first has changed. No task events: the story and
            # the flight know more of a plan than Ray's dashboard could, and they cost 3% of a small one.
            method = self.actor.__ray_call__ if self._run else self.actor._raycollect_run
            method = method.options(num_returns=outputs, max_task_retries=0, enable_task_events=False)
            self._submits[outputs] = method
        refs = method.remote(*self._run, payload)
        return [] if refs is None else refs if isinstance(refs, list) else [refs]

    def order(self, message: Order) -> None:
        """Sends a program by the channel, past the methods that wait in the actor's queue.

        Raises:
            ConnectionLostError: Its connection has ended.
        """
        link = self.link
        if link is None or self._lost:
            raise ConnectionLostError(detail="its connection has ended")
        link.send(message)

    def welcome(self, timeout_s: float) -> None:
        """Waits for the participant's answer to the lease.

        Raises:
            ControllerConflictError: Another process drives it.
        """
        if not self._answered.wait(timeout_s):
            raise CollectiveTimeoutError(op="lease", actor=self.info["actor"], detail="it gave no answer to the lease")
        if self._answer is not None:
            raise self._answer

    def survey(self) -> Future[Surveyed | None]:
        """Asks what it holds; the result is None where its connection ends before it says so."""
        return self._ask(lambda request: Survey(request=request))

    def look(self) -> Future[Seen | None]:
        """Asks what it is doing; the result is None where its connection ends before it says so."""
        return self._ask(lambda request: Look(request=request))

    def measure(self, seq: int) -> Future[Measured | None]:
        """Asks how far it is in a plan; the result is None where its connection ends before it says so."""
        return self._ask(lambda request: Measure(request=request, seq=seq))

    def record(self, limit: int, *, metrics: bool) -> Future[Ticked | None]:
        """Lets it record a timeline, see `Record`; the result is None where its connection ends before it answers."""
        return self._ask(lambda request: Record(request=request, limit=limit, metrics=metrics))

    def tick(self) -> Future[Ticked | None]:
        """Asks what its clock shows; the result is None where its connection ends before it says so."""
        return self._ask(lambda request: Tick(request=request))

    def collect(self, *, ends: bool) -> Future[bytes | None]:
        """Asks what it has recorded, see `Collect`; the result is None where its connection ends before it is told."""
        return self._ask(lambda request: Collect(request=request, ends=ends))

    def _ask(self, question: Callable[[int], Message]) -> Future[Any]:
        request, asked = next(self._requests), Future[Any]()
        self._asked[request] = asked
        self.send(question(request))
        if self._lost:
            self._end_questions()
        return asked

    def _end_questions(self) -> None:
        self._collected.clear()
        for request in list(self._asked):
            self._answered_by(request, None)

    def _collect_part(self, message: Collected) -> None:
        """A part of what was recorded came.

        Raises:
            ProtocolError: It is more than any ring holds.
        """
        if message.request not in self._asked:
            return
        parts = self._collected.setdefault(message.request, bytearray())
        parts += message.payload
        if len(parts) > MOST_COLLECTED_NBYTES:
            raise ProtocolError(detail=f"a timeline of more than {MOST_COLLECTED_NBYTES} bytes")
        if not message.more:
            del self._collected[message.request]
            self._answered_by(message.request, bytes(parts))

    def _answered_by(self, request: int, answer: Surveyed | Seen | Measured | Ticked | bytes | None) -> None:
        asked = self._asked.pop(request, None)
        if asked is not None:
            asked.set_result(answer)

    def received(self, link: Link, message: Any) -> None:
        """A message of the participant; on the hub's thread."""
        if isinstance(message, (Welcome, Refused)):
            self._answer = from_wire(message.error) if isinstance(message, Refused) else None
            self._answered.set()
        elif isinstance(message, (Surveyed, Seen, Measured, Ticked)):
            self._answered_by(message.request, message)
        elif isinstance(message, Collected):
            self._collect_part(message)
        elif isinstance(message, Ready):
            muster = self.musters.get(message.seq)
            if muster is not None:  # else the plan has failed meanwhile
                muster.received(self, message)
        else:
            self._owner.received(self, message)

    def closed(self, link: Link, reason: ChannelError) -> None:
        """The connection has ended; on the hub's thread."""
        if not self._answered.is_set():
            self._answer = reason
            self._answered.set()
        self._lost = True
        self._end_questions()
        self._owner.lost(self, reason.detail)

    def send(self, message: Any) -> None:
        """Sends a message; a link that has ended is dealt with by `closed`.

        Raises:
            ProtocolError: The message is too long; nothing of it was sent.
        """
        try:
            if self.link is not None:
                self.link.send(message)
        except ConnectionLostError:
            pass
