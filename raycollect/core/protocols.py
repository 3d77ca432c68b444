"""The interfaces between layers, and what a backend has to implement.

Pure: the standard library only. The values that they use are in `raycollect.core.model`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, runtime_checkable

from raycollect.core.boxes import BoxExchange
from raycollect.core.model import BufferRef, GroupSpec, Kernel, Launch, Segment


class Rendezvous(Protocol):
    """A small store of bytes over which the members of a group find each other, once."""

    def put(self, name: str, value: bytes) -> None:
        """Publishes a value to all members; called once per name."""
        ...

    def get(self, name: str, timeout_s: float) -> bytes:
        """Waits for a value.

        Raises:
            CollectiveTimeoutError: Nobody published it in time.
        """
        ...


class Exchange(Protocol):
    """Carries arrivals between ranks for backends without a faster way: through the coordinator, over the channel."""

    def __call__(self, launch: Launch, arrival: bytes) -> Sequence[bytes]:
        """Brings this rank's arrival, and waits for those of `launch.ranks`; returns them in that order.

        Raises:
            CollectiveTimeoutError: Not all came within `launch.timeout_s`.
            PlanAbortedError: The launch was aborted meanwhile.
        """
        ...

    def abort(self, seq: int) -> None:
        """Wakes whoever waits in this launch, or will; any thread may call it."""
        ...


class SegmentSource(Protocol):
    """Shared memory as a backend sees it: where arrays of this process lie in it, and those of others."""

    def locate(self, address: int, nbytes: int) -> BufferRef | None:
        """Returns where bytes of this process lie in shared memory; None where others can't reach them there."""
        ...

    def open(self, segment: Segment) -> Any:
        """Maps a segment of a process of this machine, or finds it mapped.

        Whoever holds what it returns, or a view of it, keeps the memory: let go of it when its process is gone.

        Returns:
            A writable array of bytes, [segment.nbytes].

        Raises:
            OSError: The process is gone, or does not let this one see its memory.
        """
        ...


class NoSegments:
    """The `SegmentSource` where there is no shared memory."""

    def locate(self, address: int, nbytes: int) -> BufferRef | None:
        """Returns None."""
        return None

    def open(self, segment: Segment) -> Any:
        """Refuses.

        Raises:
            OSError: Always.
        """
        raise OSError("this process maps no memory of others")


class Communicator(Protocol):
    """One rank's membership in a group, on one backend.

    `agree`, `launch` and `end` are called by one thread at a time, in increasing `Launch.seq`; `abort`, `lost` and
    `close` by any thread. Each launch: `agree` once or more, `launch` any number of times, then always `end`, once.

    Two attributes are optional. `device`: the device in whose memory it works, ``"cuda:0"``. `sees_departures`: whether
    a rank in `launch` sees for itself how far another rank came that has left the launch or the group, so that nobody
    has to abort it; False by default.
    """

    rank: int
    world_size: int

    def agree(
        self, launch: Launch, arrival: bytes, kernel: Kernel | None = None, expected: Sequence[bytes] | None = None
    ) -> Sequence[bytes]:
        """Brings all of `launch.ranks` together and returns everybody's `arrival`, in rank order.

        Args:
            launch: The launch.
            arrival: What this rank brings.
            kernel: The first kernel of the launch. The backend may copy what this rank gives to it to where others can
                read it. Where the launch is not refused, all of its ranks bring their first kernel or none does.
            expected: What the agreement of an earlier run has returned; ranks may differ in whether they expect
                anything.

        Returns:
            The very object `expected` where all have brought just that, so that the caller need not compare.

        Raises:
            RefusedError: The kernel can't be prepared, or the arrival is too long. Nothing was brought: the caller
                agrees again, with an arrival that says why, and without a kernel.
            CollectiveTimeoutError: Naming the ranks that did not come within `launch.timeout_s`.
            PlanAbortedError: The launch was aborted meanwhile.
        """
        ...

    def launch(self, launch: Launch, kernels: Sequence[Kernel]) -> None:
        """Runs kernels, and returns when they have ended; all of `launch.ranks` do, in the same order.

        Args:
            launch: The launch, after its agreement.
            kernels: One kernel; or several of one kind, op and root that don't depend on each other, as many on all
                ranks. Several come only where the backend's `Capabilities.coalesces`: the backend runs them with fewer
                synchronizations of the ranks where it can, or one after the other.

        Raises:
            CollectiveTimeoutError: They had not ended within `launch.timeout_s`.
            PlanAbortedError: The launch was aborted, or another rank has left it.
            KernelError: The library failed.
        """
        ...

    def end(self, launch: Launch, ok: bool, owed: Sequence[Kernel] = ()) -> tuple[int, ...]:
        """Closes the launch; called once for each launch, whatever has happened. Never waits for another rank.

        Args:
            launch: The launch.
            ok: Whether this rank ran all of it.
            owed: The kernels on which all ranks have agreed and that this rank has not ended. Others may wait in them:
                a backend whose ranks can't be interrupted there releases them.

        Returns:
            The ranks that are known to have run all of it. Where ranks can see each other, the last one to end sees
            all, so that it alone has to report; empty where they can't.
        """
        ...

    def abort(self, seq: int) -> None:
        """Makes every wait of that launch, now or later, raise PlanAbortedError.

        0 is no launch: the process of a rank has ended, so that `close` must not wait for the others.
        """
        ...

    def lost(self, rank: int) -> bool:
        """Hears that the process of a rank has ended. What that rank did before counts.

        Returns:
            True where the backend sees for itself how far that rank came: a launch for which that is enough goes on to
            its end, and waits for anything else of that rank raise PlanAbortedError, now and later. False where it
            can't: the caller aborts the launch under way.
        """
        ...

    def close(self) -> None:
        """Releases all that the communicator holds. May be called twice.

        A launch under way is woken, and releases what it uses as it ends. The library may take its time: callers that
        must not wait make the call on another thread.
        """
        ...


@runtime_checkable
class Reaching(Protocol):
    """An option of a `Communicator` whose ranks can read each other's memory: boxes move without messages."""

    def show_boxes(self, launch: Launch, boxes: BoxExchange | None) -> None:
        """Tells the others where this rank's boxes lie, before the agreement of a launch of one exchange.

        All ranks call it; with None where a rank does not know yet.

        Raises:
            CollectiveTimeoutError, PlanAbortedError: As `agree`.
        """
        ...

    def launch_boxes(self, launch: Launch, boxes: BoxExchange) -> bool:
        """Runs an exchange of boxes to its end, after the agreement of the launch.

        Returns:
            False on all ranks, and nothing was written, where one of them has memory that others can't read.
        """
        ...


class Faults(Protocol):
    """Fault injection for tests; the default does nothing."""

    def at(self, point: str, seq: int, rank: int) -> None:
        """Called by the engine at each named point of a plan; may raise, block or end the process."""
        ...


class NoFaults:
    """The `Faults` of production."""

    def at(self, point: str, seq: int, rank: int) -> None:
        """Does nothing."""


@dataclass(frozen=True, slots=True)
class Joining:
    """What a rank joins a group with.

    Attributes:
        spec: The group.
        rank: This process's rank.
        rendezvous: How the members find each other.
        exchange: How they agree, for backends without a way of their own.
        host: The address of this node, for backends that listen.
        segments: The shared memory of this process and of others, for backends that work in it.
    """

    spec: GroupSpec
    rank: int
    rendezvous: Rendezvous
    exchange: Exchange
    host: str = "127.0.0.1"
    segments: SegmentSource = field(default_factory=NoSegments)


CommunicatorFactory = Callable[[Joining], Communicator]
"""Builds the communicator of one rank: joins the group, and waits for the other members."""
