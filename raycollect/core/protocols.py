"""The interfaces between layers, and what a backend has to implement.

Pure: the standard library only. The values that they use are in `raycollect.core.model`.
"""

from __future__ import annotations

from collections.abc import Sequence
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


@runtime_checkable
class Completion(Protocol):
    """A kernel under way."""

    def wait(self, timeout_s: float) -> None:
        """Returns when the kernel has ended.

        Raises:
            CollectiveTimeoutError: It had not ended in time.
            PlanAbortedError: It was aborted.
            KernelError: The library failed.
        """
        ...


class Communicator(Protocol):
    """One rank's membership in a group, on one backend.

    `stage`, `agree`, `launch` and `end` are called by one thread at a time, in increasing `Launch.seq`; `abort` and
    `close` by any thread. Each launch: `stage` or not, `agree` once or more, `launch` per kernel, then always `end`.
    One that works in the memory of a device says in which, as its `device`: ``"cuda:0"``.
    """

    rank: int
    world_size: int

    def stage(self, launch: Launch, kernel: Kernel) -> None:
        """May copy what this rank gives to its first kernel to where others can read it, before the agreement.

        Where the launch is not refused, all of its ranks have staged or none has.
        """
        ...

    def agree(self, launch: Launch, arrival: bytes) -> Sequence[bytes]:
        """Brings all of `launch.ranks` together and returns everybody's `arrival`, in rank order.

        Raises:
            CollectiveTimeoutError: Naming the ranks that did not come within `launch.timeout_s`.
            PlanAbortedError: The launch was aborted meanwhile.
        """
        ...

    def launch(self, launch: Launch, kernel: Kernel) -> Completion:
        """Starts a kernel; all of `launch.ranks` do, in the same order."""
        ...

    def end(self, launch: Launch, ok: bool) -> tuple[int, ...]:
        """Closes the launch; `ok` tells whether this rank ran all of it.

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

    def close(self) -> None:
        """Releases all that the communicator holds. May be called twice.

        A launch under way is woken, and releases what it uses as it ends. The library may take its time: callers that
        must not wait make the call on another thread.
        """
        ...


class Again(Protocol):
    """An option of a `Communicator`: a shorter agreement for ranks that repeat the last one."""

    def again(
        self, launch: Launch, kernel: Kernel, arrival: bytes, expected: Sequence[bytes]
    ) -> Sequence[bytes] | None:
        """Does what `stage` and `agree` do, one after the other.

        Returns:
            None where all brought what is expected; else what they brought.

        Raises:
            RefusedError: As `stage`: the kernel can't be prepared. Nothing was brought.
            CollectiveTimeoutError, PlanAbortedError: As `agree`.
        """
        ...


@runtime_checkable
class Together(Protocol):
    """An option of a `Communicator`: kernels that share what each would cost by itself."""

    def launch_together(self, launch: Launch, kernels: Sequence[Kernel]) -> int:
        """Runs some of these kernels to their end, from the first one on.

        Args:
            launch: The launch, after its agreement.
            kernels: Kernels of one kind, op and root that don't depend on each other, in the same order on all ranks.

        Returns:
            How many it has run, the same on all ranks; 0 where it is better that they are launched one by one.
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


@runtime_checkable
class Forsaking(Protocol):
    """An option of a `Communicator` whose ranks can't be interrupted in a kernel."""

    def forsake(self, launch: Launch, kernels: Sequence[Kernel]) -> None:
        """Releases those who wait for this rank in one of these kernels, which it has agreed to and will not end."""
        ...


@runtime_checkable
class Surviving(Protocol):
    """An option of a `Communicator` whose ranks see for themselves how far a dead rank came."""

    def lost(self, rank: int) -> None:
        """The process of a rank has ended; any thread may call it.

        What it did before counts: a launch for which that is enough goes on to its end. Waits for anything else of that
        rank raise PlanAbortedError, now and later.
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


class CommunicatorFactory(Protocol):
    """Builds the communicator of one rank."""

    def __call__(
        self,
        spec: GroupSpec,
        rank: int,
        rendezvous: Rendezvous,
        exchange: Exchange,
        *,
        host: str = "",
        segments: SegmentSource | None = None,
    ) -> Communicator:
        """Joins a group; waits for the other members.

        Args:
            spec: The group.
            rank: This process's rank.
            rendezvous: How the members find each other.
            exchange: How they agree, for backends without a way of their own.
            host: The address of this node, for backends that listen.
            segments: The shared memory of this process and of others, for backends that work in it.
        """
        ...
