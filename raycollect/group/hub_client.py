"""A communicator's connection to its coordinator: meetings, rendezvous values, and what the hub has announced."""

from __future__ import annotations

import itertools
import math
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING

from raycollect.channel.messages import Meet, Message, Met, Missed, Publish, Withdraw
from raycollect.errors import CollectiveTimeoutError, ConnectionLostError, PlanAbortedError, RaycollectError, anew
from raycollect.group.coordinator import ranks_of

if TYPE_CHECKING:
    from raycollect.group.process_group import ProcessGroup

_ANSWER_S = 5.0
"""How long the hub may take to answer, in seconds. After that it counts as gone."""
CAUSE_S = 2.0
"""How long to wait for the hub to tell why something failed, in seconds."""

FORM, MADE = "form", "made"
"""Where ranks meet before they make a communicator, and when they have one (followed by the generation)."""


class HubRendezvous:
    """The `Rendezvous` of the generation for which ranks have met; the hub relays its values to the others.

    `deadline_s` is until when values are awaited at most, by `time.monotonic`.
    """

    def __init__(self, hub: HubClient, generation: str, deadline_s: float = math.inf) -> None:
        self.deadline_s = deadline_s
        self._hub = hub
        self._generation = generation
        self._values = hub.values

    def put(self, name: str, value: bytes) -> None:
        """Publishes a value to all ranks."""
        hub = self._hub
        with hub.changed:
            self._values[name] = value
        group_id = hub.owner.spec.group_id
        hub.send(Publish(group_id=group_id, communicator=hub.name, generation=self._generation, name=name, value=value))

    def get(self, name: str, timeout_s: float) -> bytes:
        """Waits for a value."""
        limit_s, hub = min(timeout_s, self.deadline_s - time.monotonic()), self._hub
        with hub.changed:
            hub.changed.wait_for(lambda: name in self._values or hub.why_over(self._generation), max(limit_s, 0))
            if name in self._values:
                return self._values[name]
            why = hub.why_over(self._generation)
        if why:
            raise PlanAbortedError(op="join", detail=why)
        raise CollectiveTimeoutError(op="join", detail=f"nobody published {name!r}", timeout_s=limit_s)


class HubClient:
    """The state of a communicator that messages of the hub change."""

    def __init__(self, owner: ProcessGroup, name: str) -> None:
        self.name = name
        self.ranks: tuple[int, ...] = ranks_of(name, owner.spec.world_size)
        self.owner = owner
        # Guards all that follows, and is notified of each change
        self.changed: threading.Condition = threading.Condition()
        self.call: int = 0  # the number of the call under way; 0: none
        self.place: str = ""  # where this rank waits at the hub; empty: nowhere
        self.generation: str = ""  # the nonce of the communicator; empty: there is none
        self.is_made: bool = False  # whether all ranks have a communicator of this generation
        self.agreed: bool = False  # whether all ranks have come to the agreement of the launch under way
        self.stale: bool = False  # whether another rank has left this generation; `cause` says which one, and why
        self.recalled: bool = False  # whether the attempt under way has to be given up and begun again
        self.final: bool = False  # whether the hub will not answer any more
        self.closed: bool = False  # whether no call may begin any more
        self.cause: tuple[int, RaycollectError] | None = None
        self.stop: RaycollectError | None = None  # what the call under way has to raise
        self._numbers = itertools.count(1)  # of calls and meetings
        self._meeting = 0
        self._answer: Met | Missed | None = None
        self.values: dict[str, bytes] = {}  # of the rendezvous of this generation

    def begin(self) -> None:
        """Begins a call; the caller holds the lock."""
        self.stop, self.final, self.agreed = None, False, False
        self.call = next(self._numbers)

    @property
    def is_refused(self) -> bool:
        """Whether the hub has ended this rank's meeting, so that the call ends by that answer."""
        return bool(self._meeting) and isinstance(self._answer, Missed)

    def is_off(self) -> bool:
        """Whether the launch that waits for agreement has to stop."""
        return self.stale or self.recalled or self.stop is not None

    def note_agreed(self) -> None:
        """Notes that all ranks have come; from then on the attempt is not recalled any more.

        Raises:
            PlanAbortedError: It was recalled just before. No kernel may begin.
        """
        with self.changed:
            self.agreed = True
            if self.recalled:
                raise PlanAbortedError(detail="it was recalled in the moment in which all had come")

    def notify(self) -> None:
        """Wakes all waits of this communicator."""
        with self.changed:
            self.changed.notify_all()

    # ------------------------------------------------------------------------------------------ meetings

    def meet(
        self, place: str, blob: bytes, timeout_s: float, halted: Callable[[], bool] = lambda: False
    ) -> Sequence[bytes]:
        """Waits at a place of the hub for all ranks; all name the same place. Returns what all brought, by rank.

        `halted` says whether to stop waiting; it is asked under the lock.

        Raises:
            CollectiveTimeoutError: This rank's time, or another's, is over; it names who is missing.
            PlanAbortedError: It was halted.
            RaycollectError: What the call has to raise.
        """
        group_id = self.owner.spec.group_id
        with self.changed:
            self._meeting = call = next(self._numbers)
            self.place = place
            self._forget_answer()

        def answered() -> bool:
            return self._answer is not None

        def withdraw(timed_out: bool) -> None:
            self.send(Withdraw(group_id=group_id, communicator=self.name, call=call, timed_out=timed_out))
            with self.changed:
                self.changed.wait_for(lambda: answered() or self.final, _ANSWER_S)

        try:
            self.send(Meet(group_id=group_id, communicator=self.name, place=place, call=call, blob=blob))
            with self.changed:
                self.changed.wait_for(lambda: answered() or self.stop or halted(), max(timeout_s, 0))
                timed_out = not (answered() or self.stop or halted())
        except RaycollectError:  # the hub is gone
            raise
        except BaseException:  # a signal: the others must not meet a rank that does not come
            with suppress(RaycollectError):
                withdraw(timed_out=False)
            with self.changed:
                self._meeting = 0
            raise
        pending = not answered()
        if pending:
            withdraw(timed_out)
        with self.changed:
            self._meeting = 0
            answer, stop = self._answer, self.stop
        if isinstance(answer, Met):
            self.owner.flush()
            return answer.blobs
        with self.changed:
            if stop is not None:
                raise anew(stop)
            if answer is None and pending:
                raise CollectiveTimeoutError(detail="the coordinator (the driver, or rank 0) does not answer")
            if timed_out or not halted():
                raise CollectiveTimeoutError(missing=tuple(answer.missing if answer else ()))
            raise PlanAbortedError(detail="the other ranks have left the call")

    def _forget_answer(self) -> None:  # a method, or mypy would take the answer for None until the end of `meet`
        self._answer = None

    def answered(self, message: Met | Missed) -> None:
        """The hub answers `Meet`; on its thread."""
        with self.changed:
            if message.call != self._meeting:
                return
            self._answer = message
            if isinstance(message, Met) and self.place == FORM:
                # Here and not in the call's thread, so that the messages that follow find the generation.
                self.generation, self.stale, self.cause = message.blobs[0].decode(), False, None
                self.values = {}
            self.is_made = self.is_made or (isinstance(message, Met) and self.place.startswith(MADE))
            self.changed.notify_all()

    def send(self, message: Message) -> None:
        """Sends a message to the hub; raises what the call has to, if that is gone."""
        try:
            self.owner.send(message)
        except ConnectionLostError as exc:
            with self.changed:
                self.changed.wait_for(lambda: self.stop, CAUSE_S)  # which says more than this error
                raise anew(self.stop or exc) from None

    # ------------------------------------------------------------------------------------------ the rendezvous

    def published(self, message: Publish) -> None:
        """A value of the rendezvous came; on the hub's thread."""
        with self.changed:
            if message.generation == self.generation:
                self.values[message.name] = message.value
                self.changed.notify_all()

    def wait_made(self, generation: str, is_settled: Callable[[], bool], deadline_s: float) -> bool:
        """Waits for the backend's factory; False if another rank gave up meanwhile."""
        with self.changed:
            self.changed.wait_for(
                lambda: is_settled() or self.why_over(generation), max(deadline_s - time.monotonic(), 0)
            )
            if is_settled():
                return True
            if self.stop is not None:
                raise anew(self.stop)
            if self.stale:
                return False
        raise CollectiveTimeoutError(op="join", detail="the members could not connect to each other in time")

    def why_over(self, generation: str) -> str:
        """Why nothing of a generation is awaited any more, or an empty text; under the lock."""
        if generation == self.generation and not self.stale and self.stop is None and not self.closed:
            return ""
        return getattr(self.stop, "detail", "") or "this forming of the group was given up"
