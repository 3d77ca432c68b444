"""One member's end of a communicator of its group.

The driver's plans run on a communicator that the members form when they join (`connect`); the controller numbers the
launches. For members' own calls (`member_communicator`) the ranks number the launches themselves, from the meeting in
which they got in step (`coordinator_client.CommunicatorState`): each launch includes all ranks of the communicator, so
each rank counts alike. The ranks first meet at the coordinator. If all still have the same communicator of the backend,
and the backend `resumes` (`Capabilities`), they keep it and number on from the highest number that any rank has used.
Otherwise the backend makes new communicators, and the ranks meet again. A rank that leaves before this second meeting
ends the forming for all ranks.

A launch that needs nothing more of a dead rank still completes; the next launch fails. Some backends know how far the
dead rank came (`Communicator.lost`); the others get `LAST_S` to complete the launch.
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
    ActiveCall,
    CommunicatorState,
    CoordinatorClient,
    CoordinatorRendezvous,
    Presence,
    RankPosition,
)
from raycollect.group.group_member import GroupMember

LAST_S = 1.0
"""How long a launch may continue after a rank's death, if the backend can't locate the rank."""


class GroupCommunicator:
    """One member's end of a communicator. Any thread may call `connect`, `refuse` and `close`.

    `client` holds the state that messages change, and the lock that guards all state. The coordinator's thread calls
    `received`, `stop`, `departed`, `died` and `lost`.
    """

    def __init__(self, member: GroupMember, name: str) -> None:
        self.name = name
        self.client: CoordinatorClient = CoordinatorClient(member, name)
        self.ranks: tuple[int, ...] = self.client.ranks
        self._member = member
        self._lock = self.client.lock
        self._backend: Communicator | None = None
        self._within: CallCommunicator | None = None  # the view that calls have of `_backend`
        self._resumes = False  # see `Capabilities.resumes`
        self._dead: set[int] = set()  # the ranks whose processes have ended
        self._stood = RankPosition("", 0)  # the position at which this rank's last attempt failed

    @property
    def communicator(self) -> Communicator | None:
        """The backend's communicator, or None."""
        return self._backend

    # ------------------------------------------------------------------------------------------ in step, out of step

    def _get_in_step(self, call: ActiveCall) -> bool:
        """Meets the other ranks, and makes the communicator; False: a rank gave up, so all ranks begin again."""
        client = self.client
        self._leave(keep=self._resumes)
        with self._lock:
            if client.state is not CommunicatorState.BROKEN:
                client.state = CommunicatorState.FORMING
            client.epoch, client.cause, call.agreed = "", None, False
            self._stood = RankPosition(FORM, 0)
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

    def _make(self, call: ActiveCall) -> Communicator | None:
        """Has the backend make a communicator, and waits for the other ranks' communicators; None: a rank gave up."""
        client = self.client
        self._close(CLOSE_S)
        spec = communicator_init.spec_of(self._member.spec, self.name)
        capabilities = backends.get(spec.backend, spec.name)
        backend = communicator_init.form(client, call.deadline_s)
        if backend is None:
            return None
        try:
            place, left_s = f"{MADE} {client.epoch}", call.deadline_s - time.monotonic()
            client.meet(call, place, b"", left_s, lambda: client.state is CommunicatorState.OUT_OF_STEP)
        except BaseException as exc:
            threads.bounded(backend.close, CLOSE_S)
            if isinstance(exc, PlanAbortedError):
                return None
            raise
        with self._lock:
            self._backend, client.made_in = backend, client.epoch
            self._resumes = capabilities.resumes
        return backend

    def _leave(
        self,
        error: RaycollectError | None = None,
        *,
        keep: bool = False,
        between: bool = False,
        wait_s: float = CLOSE_S,
    ) -> None:
        """Gets out of step.

        Args:
            error: Why the launch in progress failed, or why no launch follows; sent to the others once per epoch.
            keep: Whether later launches may use the backend's communicator.
            between: Whether no launch is in progress.
            wait_s: How long to wait for the backend.
        """
        client, member = self.client, self._member
        with self._lock:
            epoch, seq = client.epoch, client.seq + between if client.formed else 0
            tells = error is not None and client.cause is None and epoch
            if client.formed:
                self._stood, client.formed = RankPosition(epoch, client.seq), False
            if client.state is not CommunicatorState.BROKEN:
                client.state = CommunicatorState.OUT_OF_STEP
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
            with suppress(ConnectionLostError):  # the coordinator has ended, and with it the group
                member.send(drop)

    def _close(self, wait_s: float) -> None:
        """Closes the backend's communicator, if any."""
        with self._lock:
            backend, self._backend, self._within, self.client.made_in = self._backend, None, None, ""
        if backend is not None:
            threads.bounded(backend.close, wait_s)

    # ------------------------------------------------------------------------------------------ coordinator's thread

    def received(self, message: Message) -> None:
        """Handles a message of the coordinator for this communicator."""
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
        """Ends the call in progress with an error, as this process has left the group."""
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
        """Handles the departure of a rank. The rank has completed its launches, so only forming has to stop."""
        with self._lock:
            self._break(error)
            is_forming = not self.client.formed
        if is_forming:
            self._stop(error)

    def died(self, rank: int, error: RaycollectError) -> None:
        """Handles the death of a rank; also of rank 0, the coordinator, if it is not a rank of this communicator.

        The call in progress may still complete. `error` is the error of a call that fails.
        """
        with self._lock:
            self._dead.add(rank)
            self._break(error)
            is_idle = self.client.call is None
            self.client.stop(error)  # no later meeting can succeed
        self._tell_lost(rank)
        if is_idle:  # otherwise the call closes the communicator, and releases the dead rank's memory
            self._leave(wait_s=0.0)

    def _tell_lost(self, rank: int) -> None:
        with self._lock:
            backend, seq, is_idle = self._backend, self.client.seq, self.client.call is None
        if backend is None or rank not in self.ranks or backend.lost(self.ranks.index(rank)):
            return
        if is_idle:
            backend.abort(0)
        else:  # the launch may wait for the dead rank forever; aborting a launch that has ended has no effect
            timers.soon_or_now(LAST_S, partial(backend.abort, seq))

    def close(self, error: RaycollectError, wait_s: float = 0.0) -> None:
        """Closes the communicator; a call in progress has been stopped. Waits for the backend for at most `wait_s`."""
        if not self.end(error):  # otherwise the call in progress closes it
            self._leave(error, between=True, wait_s=wait_s)

    def end(self, error: RaycollectError) -> bool:
        """Refuses later calls. Returns whether a call is in progress."""
        with self._lock:
            self._break(error)
            return self.client.call is not None

    # ------------------------------------------------------------------------------------------ plans

    def connect(self, exchange: Exchange) -> RaycollectError | None:
        """Makes the communicator of the driver's plans; waits for the other members.

        Returns:
            The error, or None.
        """
        client, member = self.client, self._member
        rendezvous = CoordinatorRendezvous(client)
        try:
            backend = communicator_init.make_communicator(member.spec, member.rank, rendezvous, exchange, member.host)
        except RaycollectError as exc:
            return strip_traceback(exc)
        with self._lock:
            if client.broken is None:
                client.state, self._backend = CommunicatorState.OK, backend
                return None
        backend.close()
        return self.why_none()

    def why_none(self) -> RaycollectError:
        """The error of plans while this participant has no communicator."""
        broken = self.client.broken
        if broken is not None:
            return copy_error(broken)
        return GroupBrokenError(group_name=self._member.spec.name, detail="this participant never joined")

    def lost(self, rank: int) -> bool:
        """Handles the end of a rank's process. Returns False if the caller has to end the plans in progress."""
        backend = self._backend
        return backend is not None and backend.lost(rank)

    def refuse(self, reason: str) -> Communicator | None:
        """Refuses later plans with a reason. Returns the backend's communicator, which the caller has to close."""
        self.client.fail(GroupBrokenError(group_name=self._member.spec.name, detail=reason))
        with self._lock:
            backend, self._backend = self._backend, None
        return backend
