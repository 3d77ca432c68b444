"""A connection of a `tcp` group whose frames carry checksums (`pg_options={"checksum": True}`).

Each frame has the CRC-32 of its bytes in its header, so that frames are no longer than without. The receiver computes
it while data arrives, and compares before the wait for the frame may end. A mismatch fails the launch only: the frame
was read completely, so the connection goes on with the next. CRC-32 detects every burst of up to 32 bits, and all but
one in four thousand million other accidents; it does not protect against an attacker.

Headers are checked against what is expected, with and without checksums: a damaged header ends the connection, or the
wait times out.
"""

from __future__ import annotations

import socket
import zlib

from raycollect.backends.tcp.peer import Batch, Peer
from raycollect.errors import KernelError

SUMMED = 8  # Added to the kind of a frame that carries a checksum, so that ends that differ in this notice


class SummedPeer(Peer):
    """The connection to one rank; a wait raises KernelError if received bytes are damaged."""

    def __init__(self, group_name: str, me: int, rank: int, sock: socket.socket) -> None:
        super().__init__(rank, sock)
        self._group_name = group_name
        self._me = me
        self._said = self._sum = 0  # of the frame that is being read: what its header says, and what has come so far
        self._nbytes = 0

    def queue(self, kind: int, step: int, body: memoryview, batch: Batch | None, crc: int = 0) -> None:
        """Queues a frame with the checksum of its body."""
        super().queue(kind | SUMMED, step, body, batch, zlib.crc32(body))

    def _begin(self, seq: int, kind: int, core: int, step: int, nbytes: int, crc: int) -> None:
        if not kind & SUMMED:
            self.lose("what came has no checksum, and this rank's group has: the members' options differ")
            return
        self._said, self._sum, self._nbytes = crc, 0, nbytes
        super()._begin(seq, kind & ~SUMMED, core, step, nbytes, 0)

    def _fill(self, nbytes: int) -> None:
        into = self._into
        if into is not None:
            self._sum = zlib.crc32(into[:nbytes], self._sum)
        super()._fill(nbytes)
        if into is not None and not self._need and self._sum != self._said:
            sums = f"their CRC-32 is {self._sum:08x} and not {self._said:08x}"
            cure = "The group works on: write anew what this was to write, and call again"
            detail = f"{self._nbytes} bytes from rank {self.rank} were damaged on their way; {sums}. {cure}"
            raise KernelError(group_name=self._group_name, rank=self._me, detail=detail)
