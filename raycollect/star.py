"""The hub of a group that its members made: rank 0, to whom all others connect. Needs no Ray."""

from __future__ import annotations

import secrets
import threading
import time
from contextlib import suppress
from typing import Any

from raycollect.channel import DataLink, Link, Server
from raycollect.channel.messages import Depart, Message, Refused, Welcome
from raycollect.errors import (
    ChannelError,
    ConnectionLostError,
    InvalidGroupError,
    ProtocolError,
    RaycollectError,
    to_wire,
)
from raycollect.gate import Gate, Orders
from raycollect.model import Address
from raycollect.seat import Seat

__all__ = ["Star"]

_FLUSH_S = 0.0005


class Star:
    """Relays for the members of one group. It serves until the last of them has left, rank 0 itself included.

    Args:
        host: Where to listen.
        name: What the user calls the group.
        claim: What rank 0 was told of the group: ``world_size``, ``backend``, ``who`` it is.
    """

    def __init__(self, host: str, name: str, claim: dict[str, Any]) -> None:
        self.group_id: str = secrets.token_hex(8)
        self.name = name
        self.complete = False  # whether all have joined
        self.all_told: threading.Event = threading.Event()  # of a failure, all who were to join
        self._claim = claim
        self._world_size: int = claim["world_size"]
        self._gate = Gate(self.group_id, self._world_size, name)
        self._seat: Seat | None = None
        self._failed: RaycollectError | None = None
        self._refused = 0
        self._links: dict[int, Link] = {}
        self._who: dict[int, str] = {0: claim["who"]}
        self._lock = threading.Lock()
        self._server = Server(host, secrets.token_bytes(32), self)

    @property
    def address(self) -> Address:
        """Where the members connect."""
        return self._server.address

    def attach(self, seat: Seat) -> None:
        """Tells the hub of rank 0's own seat."""
        self._seat = seat

    def send(self, message: Message) -> None:
        """What rank 0 itself says."""
        with self._lock:
            self._deliver(self._gate.receive(0, message))

    def flush(self) -> None:
        """Waits until all that was said is on its way; by rank 0, before it does what may hold the GIL."""
        while any(link.queued_nbytes for link in list(self._links.values())):
            time.sleep(_FLUSH_S)

    def leave(self) -> None:
        """Rank 0 has destroyed the group on its side; the hub goes on for the others."""
        with self._lock:
            self._seat = None
            self._deliver(self._gate.receive(0, Depart(group_id=self.group_id)))
            idle = not self._links
        if idle:
            self._server.close()

    def fail(self, error: RaycollectError) -> None:
        """The members can't become a group: all who have come, and who will come, hear why."""
        with self._lock:
            self._fail(error)

    def close(self) -> None:
        """Ends the hub."""
        self._server.close()

    # ------------------------------------------------------------------------------------------ server's thread

    def opened(self, link: Link, hello: dict[str, Any]) -> None:
        """A member has connected, or another leader that looks whether this one lives."""
        with self._lock:
            if hello.get("probe"):
                link.send(Welcome(participant={}))
                return
            if self._failed is None:
                problem = self._problem(hello)
                if not problem:
                    self._admit(link, hello)
                    return
                error: RaycollectError = InvalidGroupError(group_name=self.name, detail=problem)
                if not self.complete:
                    self._fail(error)
            else:
                error = self._failed
            self._refuse(link, error)

    def received(self, link: Link, message: Message) -> None:
        """A member said something."""
        with self._lock:
            rank = self._rank_of(link)
            if rank < 0:
                raise ProtocolError(detail=f"{type(message).__name__} from one who is no member")
            self._deliver(self._gate.receive(rank, message))

    def closed(self, link: Link, reason: ChannelError) -> None:
        """A connection has ended: its member has departed, or its process has ended."""
        with self._lock:
            rank = self._rank_of(link)
            if rank < 0:
                return
            del self._links[rank]
            self._deliver(self._gate.lost(rank, reason.detail))
            idle = self._seat is None and not self._links and self._failed is None
        if idle:
            self._server.close()

    def serve_data(self, link: DataLink) -> None:
        """Serves nothing: tensors have other ways."""

    def _problem(self, hello: dict[str, Any]) -> str:
        """Why one who comes can't be a member."""
        rank, world_size, backend = hello.get("rank"), hello.get("world_size"), hello.get("backend")
        who = f"rank {rank} ({hello.get('who')})"
        mine = f"rank 0 ({self._who[0]})"
        if world_size != self._world_size:
            return f"{who} says that world_size is {world_size}, and {mine} that it is {self._world_size}"
        if backend != self._claim["backend"]:
            return f"{who} asks for backend {backend!r}, and {mine} for {self._claim['backend']!r}"
        if hello.get("options") != self._claim["options"]:
            return f"{who} gives other pg_options than {mine}"
        if not isinstance(rank, int) or not 0 <= rank < self._world_size:
            return f"{who} is no rank of a group of {self._world_size}"
        if rank in self._who:
            return f"rank {rank} was taken twice: by {self._who[rank]} and by {hello.get('who')}"
        return ""

    def _admit(self, link: Link, hello: dict[str, Any]) -> None:
        rank = hello["rank"]
        self._links[rank] = link
        self._who[rank] = str(hello.get("who"))
        link.send(Welcome(participant={"group_id": self.group_id}))

    def _refuse(self, link: Link, error: RaycollectError) -> None:
        self._refused += 1
        with suppress(ConnectionLostError):
            link.send(Refused(error=to_wire(error)))
        if self._refused >= self._world_size - 1:
            self.all_told.set()

    def _fail(self, error: RaycollectError) -> None:
        if self._failed is not None:
            return
        self._failed = error
        if self._world_size == 1:
            self.all_told.set()
        for link in self._links.values():
            self._refuse(link, error)
        if self._seat is not None:
            self._seat.lost(error)

    def _rank_of(self, link: Link) -> int:
        return next((rank for rank, other in self._links.items() if other is link), -1)

    def _deliver(self, orders: Orders) -> None:
        """Sends what the gate wants said, in its order: under the lock, since no send here ever waits.

        Rank 0 comes last: what it does next may hold the GIL until the others, who must have heard, do the same.
        """
        for rank, message in orders:
            link = self._links.get(rank)
            if link is not None:
                with suppress(ConnectionLostError):  # `closed` deals with it
                    link.send(message)
        for rank, message in orders:
            if rank == 0 and self._seat is not None:
                self._seat.received(message)
