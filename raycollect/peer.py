"""One participant, as the controller that leases it sees it."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, Protocol

from raycollect.channel import Link
from raycollect.channel.messages import Message, Refused, Survey, Surveyed, Welcome
from raycollect.errors import ChannelError, CollectiveTimeoutError, ConnectionLostError, RaycollectError, from_wire


class PeerOwner(Protocol):
    """What a peer tells its controller; on the hub's thread."""

    def received(self, peer: Peer, message: Message) -> None:
        """The participant said something."""
        ...

    def lost(self, peer: Peer, reason: str) -> None:
        """Its connection has ended."""
        ...


class Peer:
    """One leased participant.

    Args:
        owner: Who leased it.
        info: What it said of itself (`Runtime.describe`).
        actor: Its actor handle; does not keep the actor alive where the group was derived.
        run: What an actor without the mixin runs programs with; a function of the actor and the program.
    """

    def __init__(self, owner: PeerOwner, info: dict[str, Any], actor: Any, run: Callable[[Any, bytes], None]) -> None:
        self.info = info
        self.actor = actor
        self.last_seq = 0
        self.group_ids: set[str] = set()
        self.link: Link | None = None
        self._owner = owner
        self._answer: RaycollectError | None = None
        self._answered = threading.Event()
        self._submits: dict[int, Any] = {}
        self._requests = itertools.count(1)
        self._surveys: dict[int, Future[Surveyed | None]] = {}
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
        request, asked = next(self._requests), Future[Surveyed | None]()
        self._surveys[request] = asked
        self.send(Survey(request=request))
        if self._lost:
            self._end_surveys()
        return asked

    def _end_surveys(self) -> None:
        for request in list(self._surveys):
            self._surveyed(request, None)

    def _surveyed(self, request: int, answer: Surveyed | None) -> None:
        asked = self._surveys.pop(request, None)
        if asked is not None:
            asked.set_result(answer)

    def received(self, link: Link, message: Any) -> None:
        """A message of the participant; on the hub's thread."""
        if isinstance(message, (Welcome, Refused)):
            self._answer = from_wire(message.error) if isinstance(message, Refused) else None
            self._answered.set()
        elif isinstance(message, Surveyed):
            self._surveyed(message.request, message)
        else:
            self._owner.received(self, message)

    def closed(self, link: Link, reason: ChannelError) -> None:
        """The connection has ended; on the hub's thread."""
        if not self._answered.is_set():
            self._answer = reason
            self._answered.set()
        self._lost = True
        self._end_surveys()
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
