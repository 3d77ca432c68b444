"""The common base of communicators whose ranks agree over the exchange before they enter a library."""

from __future__ import annotations

from collections.abc import Sequence

from raycollect.backends.kernels import aborted, recognized
from raycollect.core.model import Kernel, Launch
from raycollect.core.protocols import Joining
from raycollect.errors import GroupBrokenError, RaycollectError, Violation, refusal


class Exchanged:
    """The part of a `Communicator` that needs no library."""

    def __init__(self, joining: Joining) -> None:
        self.rank: int = joining.rank
        self.world_size: int = joining.spec.world_size
        self._group_name: str = joining.spec.name
        self._exchange = joining.exchange
        self._aborted: set[int] = set()
        self._broken = ""

    def agree(
        self, launch: Launch, arrival: bytes, kernel: Kernel | None = None, expected: Sequence[bytes] | None = None
    ) -> Sequence[bytes]:
        """Exchanges arrivals among `launch.ranks`, so that the library never waits for an absent rank."""
        self._check_going(launch)
        if kernel is not None:
            self._check_kernel(launch, kernel)
        return recognized(self._exchange(launch, arrival), expected)

    def launch(self, launch: Launch, kernels: Sequence[Kernel]) -> None:
        """Runs kernels in the caller's thread, one after the other."""
        for kernel in kernels:
            self._check_going(launch)
            self._run(launch, kernel)

    def end(self, launch: Launch, ok: bool, owed: Sequence[Kernel] = ()) -> tuple[int, ...]:
        """Leaves the launch."""
        for seq in tuple(self._aborted):  # in place: another thread may add meanwhile
            if seq <= launch.seq:
                self._aborted.discard(seq)
        return ()

    def abort(self, seq: int) -> None:
        """Wakes this rank in the agreement; a kernel notices at its next check."""
        self._aborted.add(seq)
        self._exchange.abort(seq)

    def lost(self, rank: int) -> bool:
        """Returns False: the ranks of a library don't see the progress of another rank."""
        return False

    def close(self) -> None:
        """Makes further launches raise."""
        self._broken = self._broken or "the communicator was closed"

    def _run(self, launch: Launch, kernel: Kernel) -> None:
        # Runs a kernel to its end.
        raise NotImplementedError

    def _check_kernel(self, launch: Launch, kernel: Kernel) -> None:
        # Raises RefusedError if the library can't run it.
        pass

    def _refused(self, kernel: Kernel, field: str, actual: str, expected: str) -> RaycollectError:
        violation = Violation(kind="unsupported", rank=self.rank, field=field, found=actual, expected=expected)
        return refusal(kernel.kind.value, self._group_name, (violation,))

    def _check_going(self, launch: Launch) -> None:
        self._check_whole()
        self._check_aborted(launch)

    def _check_aborted(self, launch: Launch) -> None:
        if launch.seq in self._aborted:
            raise aborted(self._group_name, launch, self.rank)

    def _check_whole(self) -> None:
        if self._broken:
            raise GroupBrokenError(group_name=self._group_name, detail=self._broken)
