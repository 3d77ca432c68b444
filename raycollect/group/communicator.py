"""One member's end of a communicator of its group.

The driver's plans run on one that the members make when their controller has them join (`connect`); the controller
numbers the launches. Members' own calls (`member_communicator`) are numbered by the ranks themselves, from the meeting
in which they got in step (`coordinator_client.State`): all launches take all ranks of the communicator, so each counts
them. First they meet at the coordinator. If all still have the backend's communicator of the last time, and it
`resumes` (`Capabilities`), they go on with it, above the highest number that any of them has seen. Else the backend
makes new ones, and all who have one meet again: a rank that leaves before that ends the forming for all, after it for
nobody.

What a rank did before it died counts: a launch that needs no more of it runs to its end, and only the next one hears of
the death. Some backends see how far a rank came (`Communicator.lost`); the others get `LAST_S` to end well.
"""

from __future__ import annotations

import secrets
import time
from contextlib import suppress
from functools import partial

from raycollect import backends
from raycollect.channel.messages import Drop, Message, Met, Publish
from raycollect.core import threads, timers
from raycollect.core.protocols import Communicator, Exchange
from raycollect.errors import (
    ConnectionLostError,
    GroupBrokenError,
    PlanAbortedError,
    RaycollectError,
    copy_error,
    from_wire,
    strip_traceback,
    to_wire,
)
from raycollect.group import communicator_init
from raycollect.group.call_communicator import CallCommunicator
from raycollect.group.communicator_init import CLOSE_S
from raycollect.group.coordinator_client import (
    FORM,
    MADE,
    PRESENCES,
    Call,
    CoordinatorClient,
    CoordinatorRendezvous,
    Position,
    Presence,
    State,
)
from raycollect.group.group_member import GroupMember

LAST_S = 1.0
"""How long a launch may go on after a rank's process has ended, if the backend does not see how far that came."""


class GroupCommunicator:
    """One member's end. Any thread may call `connect`, `refuse` and `close`.

    `client` has the state that messages change, and the lock of all of it. The coordinator's thread calls `received`,
    `stop`, `departed`, `died` and `lost`.
    """

    def __init__(self, member: GroupMember, name: str) -> None:
        self.name = name
        self.client: CoordinatorClient = CoordinatorClient(member, name)
        self.ranks: tuple[int, ...] = self.client.ranks
        self._member = member
        self._lock = self.client.lock
        self._backend: Communicator | None = None
        self._within: CallCommunicator | None = None  # the same as calls see it
        self._resumes = False  # as `Capabilities` says of the backend
        self._dead: set[int] = set()  # the ranks whose processes have ended
        self._stood = Position("", 0)  # how far this rank was when its last attempt failed

    @property
    def communicator(self) -> Communicator | None:
        """The backend's communicator; None: there is none now."""
        return self._backend

    # ------------------------------------------------------------------------------------------ in step, out of step

    def _get_in_step(self, call: Call) -> bool:
        """Meets the other ranks, and makes the communicator; False: one gave up, so that all have to begin again."""
        client = self.client
        self._leave(keep=self._resumes)
        with self._lock:
            if client.state is not State.BROKEN:
                client.state = State.FORMING
            client.epoch, client.cause, call.agreed = "", None, False
            self._stood = Position(FORM, 0)
            presence = Presence(secrets.token_hex(8), client.made_in, client.seq)
        client.meet(call, FORM, PRESENCES.encode(presence), call.deadline_s - time.monotonic())
        backend = self._backend if client.made_in else self._make(call)
        if backend is None:
            return False
        with self._lock:
            self._within = CallCommunicator(client, backend)
            dead = tuple(self._dead)
        for rank in dead:
            self._tell_lost(rank)
        return True

    def _make(self, call: Call) -> Communicator | None:
        """Has the backend make a communicator, and waits until all ranks have one; None: one gave up."""
        client = self.client
        self._close(CLOSE_S)
        spec = communicator_init.spec_of(self._member.spec, self.name)
        capabilities = backends.get(spec.backend, spec.name)
        made = communicator_init.form(client, call.deadline_s)
        if made is None:
            return None
        try:
            place, left_s = f"{MADE} {client.epoch}", call.deadline_s - time.monotonic()
            client.meet(call, place, b"", left_s, lambda: client.state is State.OUT_OF_STEP)
        except BaseException as exc:
            threads.bounded(made.close, CLOSE_S)
            if isinstance(exc, PlanAbortedError):
                return None
            raise
        with self._lock:
            self._backend, client.made_in = made, client.epoch
            self._resumes = capabilities.resumes
        return made

    def _leave(
        self,
        error: RaycollectError | None = None,
        *,
        keep: bool = False,
        between: bool = False,
        wait_s: float = CLOSE_S,
    ) -> None:
        """Gets out of step; once tells the other ranks the error with which the launch under way failed.

        `keep`: the backend's communicator is for the next launches, too. `between` launches, the error says why there
        will be no other. `wait_s`: how long it may wait for the backend.
        """
        client, member = self.client, self._member
        with self._lock:
            epoch, seq = client.epoch, client.seq + between if client.formed else 0
            tells = error is not None and client.cause is None and epoch
            if client.formed:
                self._stood, client.formed = Position(epoch, client.seq), False
            if client.state is not State.BROKEN:
                client.state = State.OUT_OF_STEP
            if error is not None:
                client.epoch = ""
        if not keep:
            self._close(wait_s)
        if tells and error is not None:
            drop = Drop(
                group_id=member.spec.group_id,
                communicator=self.name,
                epoch=epoch,
                seq=seq,
                rank=member.rank,
                error=to_wire(error),
            )
            with suppress(ConnectionLostError):  # the coordinator is gone, and so is the group
                member.send(drop)

    def _close(self, wait_s: float) -> None:
        """Closes the backend's communicator, if there is one."""
        with self._lock:
            backend, self._backend, self._within, self.client.made_in = self._backend, None, None, ""
        if backend is not None:
            threads.bounded(backend.close, wait_s)

    # ------------------------------------------------------------------------------------------ coordinator's thread

    def received(self, message: Message) -> None:
        """A message of the coordinator for this communicator."""
        client = self.client
        if isinstance(message, Met) and message.error is not None:
            self._stop(from_wire(message.error), message.call)
        elif isinstance(message, Met):
            client.answered(message)
        elif isinstance(message, Publish):
            client.published(message)
        elif isinstance(message, Drop):
            with self._lock:
                backend, seq = self._backend, client.seq
                aborts = client.left(message, sees=getattr(backend, "sees_departures", False))
            if aborts and backend is not None:
                backend.abort(seq)

    def stop(self, error: RaycollectError) -> None:
        """The group has ended here: ends the call under way with an error."""
        self._stop(error, breaks=True)

    def _stop(self, error: RaycollectError, number: int = 0, *, breaks: bool = False) -> None:
        with self._lock:
            if breaks:
                self._break(error)
            stops, backend, seq = self.client.stop(error, number), self._backend, self.client.seq
        if stops and backend is not None:
            backend.abort(seq)

    def _break(self, error: RaycollectError) -> None:
        self.client.fail(self._member.broken(self.ranks) or error)

    def departed(self, error: RaycollectError) -> None:
        """A rank has departed. It has ended what it had begun and left the rest, so only forming has to stop."""
        with self._lock:
            self._break(error)
            is_forming = not self.client.formed
        if is_forming:
            self._stop(error)

    def died(self, rank: int, error: RaycollectError) -> None:
        """The process of a rank has ended, perhaps that of rank 0, which coordinates but is not of this communicator.

        What it did before counts: the call under way may yet end well. `error` is for one that fails.
        """
        with self._lock:
            self._dead.add(rank)
            self._break(error)
            is_idle = self.client.call is None
            self.client.stop(error)  # no meeting can succeed any more
        self._tell_lost(rank)
        if is_idle:  # else that call closes the communicator, and lets go of the dead rank's memory
            self._leave(wait_s=0.0)

    def _tell_lost(self, rank: int) -> None:
        with self._lock:
            backend, seq, is_idle = self._backend, self.client.seq, self.client.call is None
        if backend is None or rank not in self.ranks or backend.lost(self.ranks.index(rank)):
            return
        if is_idle:
            backend.abort(0)
        else:  # it may wait for the dead for ever; if it has ended by then, this changes nothing
            timers.soon_or_now(LAST_S, partial(backend.abort, seq))

    def close(self, error: RaycollectError, wait_s: float = 0.0) -> None:
        """Ends the communicator for good; a call under way was stopped before. Waits for the backend so long."""
        if not self.end(error):  # else the call under way closes it
            self._leave(error, between=True, wait_s=wait_s)

    def end(self, error: RaycollectError) -> bool:
        """Lets no call begin any more. Returns whether one is under way."""
        with self._lock:
            self._break(error)
            return self.client.call is not None

    # ------------------------------------------------------------------------------------------ plans

    def connect(self, exchange: Exchange) -> RaycollectError | None:
        """Makes the communicator of the driver's plans, which waits for the other members.

        Returns:
            The error if that fails.
        """
        client, member = self.client, self._member
        rendezvous = CoordinatorRendezvous(client)
        try:
            made = communicator_init.make_communicator(member.spec, member.rank, rendezvous, exchange, member.host)
        except RaycollectError as exc:
            return strip_traceback(exc)
        with self._lock:
            if client.broken is None:
                client.state, self._backend = State.OK, made
                return None
        made.close()
        return self.why_none()

    def why_none(self) -> RaycollectError:
        """Why there is no communicator for plans, or none any more."""
        broken = self.client.broken
        if broken is not None:
            return copy_error(broken)
        return GroupBrokenError(group_name=self._member.spec.name, detail="this participant never joined")

    def lost(self, rank: int) -> bool:
        """A rank's process has ended. Returns False if the caller has to end the plans under way."""
        backend = self._backend
        return backend is not None and backend.lost(rank)

    def refuse(self, reason: str) -> Communicator | None:
        """Plans that begin from now on get no communicator, and hear why; returns what the caller has to close."""
        self.client.fail(GroupBrokenError(group_name=self._member.spec.name, detail=reason))
        with self._lock:
            backend, self._backend = self._backend, None
        return backend
