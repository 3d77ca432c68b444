"""The interfaces between layers, including those of backends.

Pure: the standard library only. The values that they use are in `raycollect.core.model`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, runtime_checkable

from raycollect.core.boxes import BoxExchange
from raycollect.core.model import BufferRef, GroupSpec, Kernel, Launch, Segment


class Rendezvous(Protocol):
    """A small key-value store by which the members of a group find each other once."""

    def put(self, name: str, value: bytes) -> None:
        """Publishes a value to all members; called once per name."""
        ...

    def get(self, name: str, timeout_s: float) -> bytes:
        """Waits for a value.

        Raises:
            CollectiveTimeoutError: No rank published it in time.
        """
        ...


class Exchange(Protocol):
    """Carries arrivals between ranks through the coordinator, for backends without a faster transport."""

    def __call__(self, launch: Launch, arrival: bytes) -> Sequence[bytes]:
        """Sends this rank's arrival, and waits for those of `launch.ranks`; returns them in that order.

        Raises:
            CollectiveTimeoutError: Not all ranks arrived within `launch.timeout_s`.
            PlanAbortedError: The launch was aborted meanwhile.
        """
        ...

    def abort(self, seq: int) -> None:
        """Makes waits in this launch raise, now and later; any thread may call it."""
        ...


class SegmentSource(Protocol):
    """Shared memory as a backend sees it: the positions of this process's arrays, and segments of others."""

    def locate(self, address: int, nbytes: int) -> BufferRef | None:
        """Returns the position of bytes of this process in shared memory; None if others can't access them there."""
        ...

    def open(self, segment: Segment) -> Any:
        """Maps a segment of a process of this machine, or returns the existing mapping.

        The result and its views keep the memory alive: drop them when the process has ended.

        Returns:
            A writable array of bytes, [segment.nbytes].

        Raises:
            OSError: The process has ended, or does not allow access to its memory.
        """
        ...


class NoSegments:
    """The `SegmentSource` without shared memory."""

    def locate(self, address: int, nbytes: int) -> BufferRef | None:
        """Returns None."""
        return None

    def open(self, segment: Segment) -> Any:
        """Refuses.

        Raises:
            OSError: Always.
        """
        raise OSError("this process does not map memory of other processes")


ARRIVAL_NBYTES = 60 << 10
"""The longest arrival of one `Communicator.agree`: longer ones travel in parts."""

SMALL_KERNEL_NBYTES = 32 << 10
"""The kernels of one launch are all of smaller tensors than this, or none is: small tensors are cheaper to pack."""


class Communicator(Protocol):
    """One rank's membership in a group, on one backend.

    `agree`, `launch` and `end` are called by one thread at a time, in increasing `Launch.seq`; `abort`, `lost` and
    `close` by any thread. Each launch: `agree` once or more, `launch` any number of times, then always `end`, once.

    Two attributes are optional. `device`: the device in whose memory it works, ``"cuda:0"``. `sees_departures`: whether
    a rank in `launch` sees the progress of another rank that has left the launch or the group, so that the launch need
    not be aborted; False by default.
    """

    rank: int
    world_size: int

    def agree(
        self, launch: Launch, arrival: bytes, kernel: Kernel | None = None, expected: Sequence[bytes] | None = None
    ) -> Sequence[bytes]:
        """Waits for all of `launch.ranks` and returns their arrivals, in rank order.

        A further agreement may follow, even if ranks passed a kernel: arrivals decide that, so all ranks know it.

        Args:
            launch: The launch.
            arrival: The bytes that this rank sends to the others, at most `ARRIVAL_NBYTES`.
            kernel: The first kernel of the launch. The backend may stage its input for other ranks. Unless the launch
                is refused, or another agreement follows, all ranks pass their first kernel, or none does.
            expected: The result of the agreement of an earlier run, or None; ranks may differ in this.

        Returns:
            The object `expected` if the arrivals equal it, so that the caller need not compare.

        Raises:
            RefusedError: The kernel can't be prepared, or the arrival is too long. Nothing was sent: the caller agrees
                again, with an arrival that reports the reason, and without a kernel.
            CollectiveTimeoutError: Names the ranks that did not arrive within `launch.timeout_s`.
            PlanAbortedError: The launch was aborted meanwhile.
        """
        ...

    def launch(self, launch: Launch, kernels: Sequence[Kernel]) -> None:
        """Runs kernels, and returns when they have ended; all of `launch.ranks` do, in the same order.

        Args:
            launch: The launch, after its agreement.
            kernels: One kernel; or several independent kernels of one kind, op and root, equally many on all ranks, if
                the backend's `Capabilities.coalesces` is True: the backend runs them with fewer synchronizations of
                the ranks, or one after the other. All are smaller than `SMALL_KERNEL_NBYTES`, or none is.

        Raises:
            CollectiveTimeoutError: They had not ended within `launch.timeout_s`.
            PlanAbortedError: The launch was aborted, or another rank has left it.
            KernelError: The library failed.
        """
        ...

    def end(self, launch: Launch, ok: bool, owed: Sequence[Kernel] = ()) -> tuple[int, ...]:
        """Closes the launch; called once for each launch, also after a failure. Never waits for another rank.

        Args:
            launch: The launch.
            ok: Whether this rank ran all of it.
            owed: The kernels on which all ranks have agreed and that this rank has not ended. Other ranks may wait in
                them: a backend without interruptible kernels releases these ranks.

        Returns:
            The ranks known to have run all of it. If ranks can see each other, the last one to end sees all, so that
            only that rank reports; empty if they can't.
        """
        ...

    def abort(self, seq: int) -> None:
        """Makes every wait of that launch, now or later, raise PlanAbortedError.

        0 is not a launch: the process of a rank has ended, so `close` must not wait for the others.
        """
        ...

    def lost(self, rank: int) -> bool:
        """Notifies the communicator that the process of a rank has ended. Completed steps of that rank stay valid.

        Returns:
            True if the backend sees the progress of that rank: a launch that needs nothing more from it continues to
            its end, and other waits for that rank raise PlanAbortedError, now and later. False if it can't: the
            caller aborts the current launch.
        """
        ...

    def close(self) -> None:
        """Releases the communicator's resources. May be called twice.

        A running launch is woken, and releases its resources as it ends. The library may block for a while: callers
        that must not wait make the call in another thread.
        """
        ...


@runtime_checkable
class Reaching(Protocol):
    """An option of a `Communicator` whose ranks can read each other's memory: boxes move without messages."""

    def show_boxes(self, launch: Launch, boxes: BoxExchange | None) -> None:
        """Publishes the positions of this rank's boxes, before the agreement of a launch of one exchange.

        All ranks call it, with None if a rank does not know its boxes yet.

        Raises:
            CollectiveTimeoutError, PlanAbortedError: As `agree`.
        """
        ...

    def launch_boxes(self, launch: Launch, boxes: BoxExchange) -> bool:
        """Runs an exchange of boxes to its end, after the agreement of the launch.

        Returns:
            False on all ranks, without any writes, if one of them has memory that others can't read.
        """
        ...


class Faults(Protocol):
    """Fault injection, for tests."""

    def at(self, point: str, seq: int, rank: int) -> None:
        """Called by the engine at each named point of a plan; may raise, block or end the process."""
        ...


@dataclass(frozen=True, slots=True)
class Joining:
    """The arguments with which a rank joins a group.

    Attributes:
        spec: The group.
        rank: This process's rank.
        rendezvous: The store by which the members find each other.
        exchange: The agreement for backends without their own.
        host: The address of this node, for backends that listen.
        segments: The shared memory of this process and of others, for backends that use it.
    """

    spec: GroupSpec
    rank: int
    rendezvous: Rendezvous
    exchange: Exchange
    host: str = "127.0.0.1"
    segments: SegmentSource = field(default_factory=NoSegments)


CommunicatorFactory = Callable[[Joining], Communicator]
"""Builds the communicator of one rank: joins the group, and waits for the other members."""
