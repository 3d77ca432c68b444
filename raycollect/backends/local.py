"""Backend `local`: groups of one rank. Each operation copies the source to the target."""

from __future__ import annotations

from collections.abc import Sequence

from raycollect.backends.arrays import Flat
from raycollect.backends.capabilities import refuse_unknown
from raycollect.backends.exchanged import Exchanged
from raycollect.backends.kernels import check_fit, recognized, translated
from raycollect.core.model import Kernel, Launch
from raycollect.core.protocols import Communicator, Joining
from raycollect.errors import BackendUnavailableError


def create(joining: Joining) -> Communicator:
    """Makes the communicator of a group of one.

    Raises:
        InvalidGroupError: An option is unknown.
        BackendUnavailableError: The group has more members.
    """
    spec = joining.spec
    refuse_unknown(spec)
    if spec.world_size != 1:
        detail = f"backend 'local' lives inside one process, and the group has {spec.world_size} members"
        raise BackendUnavailableError(group_name=spec.name, detail=detail)
    return LocalCommunicator(joining)


class LocalCommunicator(Exchanged):
    """The membership of the only rank."""

    def agree(
        self, launch: Launch, arrival: bytes, kernel: Kernel | None = None, expected: Sequence[bytes] | None = None
    ) -> Sequence[bytes]:
        """Returns this rank's arrival."""
        self._check_going(launch)
        return recognized([arrival], expected)

    def abort(self, seq: int) -> None:
        """Makes the rest of that launch raise; it has no waits."""
        self._aborted.add(seq)

    def _run(self, launch: Launch, kernel: Kernel) -> None:
        src, dst = (side[0] if isinstance(side, tuple) else side for side in (kernel.src, kernel.dst))
        with translated(kernel.kind, self._group_name, self.rank):
            if src is not None and dst is not None and dst is not src:
                given, taken = Flat(src), Flat(dst)
                check_fit(kernel, given, taken)
                taken.write(0, taken.size, given.read(0, given.size))
