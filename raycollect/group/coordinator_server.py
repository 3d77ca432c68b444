"""The coordinator of a group that its members formed: a server in rank 0, to which all others connect. Needs no Ray."""

from __future__ import annotations

import secrets
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import suppress
from typing import Any

from msgspec.structs import replace

from raycollect.channel import ControlLink, DataLink, Server
from raycollect.channel.messages import Gone, Message, Met, Refused, Welcome
from raycollect.core import threads
from raycollect.core.model import Address, GroupSpec
from raycollect.errors import (
    ChannelError,
    ConnectionLostError,
    InvalidGroupError,
    ProtocolError,
    RaycollectError,
    to_wire,
)
from raycollect.errors.text import shown
from raycollect.group.coordinator import Coordinator, Orders
from raycollect.group.process_group import ProcessGroup

FADING_S = 5.0
"""How long the coordinator of a group that failed to form stays, to report the failure to late members, in seconds."""

MOST_FLUSH_S = 1.0
"""How long rank 0 waits at most for members to read their messages, in seconds: a stopped process reads none."""

_FLUSH_S = 0.0005


def hello_of(spec: GroupSpec, rank: int, who: str) -> dict[str, Any]:
    """The hello of a member to rank 0: its arguments for the group, and its name."""
    named = {"rank": rank, "world_size": spec.world_size, "backend": spec.backend, "who": who}
    return named | {"options": repr(spec.options)}


class CoordinatorServer:
    """Relays for the members of one group. It serves until the last of them, with rank 0, has left.

    Args:
        host: The address to listen on.
        spec: Rank 0's arguments for the group; the server sets the id.
        who: The name of rank 0 for a person.
    """

    def __init__(self, host: str, spec: GroupSpec, who: str) -> None:
        self.spec: GroupSpec = replace(spec, group_id=secrets.token_hex(8))
        self.complete = False  # whether all have joined
        self._coordinator = Coordinator(self.spec.group_id, spec.world_size, spec.name)
        self._process_group: ProcessGroup | None = None
        self._failed: RaycollectError | None = None
        self._all_notified = threading.Event()  # set when all other ranks know of the failure
        self._fading: Future[object] | None = None
        self._notified: set[tuple[str, str]] = set()  # (rank, who) of members that know of the failure, or have left
        self._links: dict[int, ControlLink] = {}
        self._who: dict[int, str] = {0: who}
        self._lock = threading.Lock()
        self._server = Server(host, secrets.token_bytes(32), self)

    @property
    def address(self) -> Address:
        """The address to which the members connect."""
        return self._server.address

    def attach(self, process_group: ProcessGroup) -> None:
        """Sets rank 0's own process group, and reports an earlier failure to it."""
        with self._lock:
            self._process_group = process_group
            if self._failed is not None:
                process_group.lost(self._failed)

    def send(self, message: Message) -> None:
        """Handles a message of rank 0 itself."""
        with self._lock:
            self._deliver(self._coordinator.receive(0, message))

    def flush(self) -> None:
        """Waits a moment until all messages are sent; for rank 0, before work that may hold the GIL."""
        until_s = time.monotonic() + MOST_FLUSH_S
        while any(link.queued_nbytes for link in list(self._links.values())) and time.monotonic() < until_s:
            time.sleep(_FLUSH_S)

    def leave(self) -> None:
        """Handles the departure of rank 0; the coordinator keeps serving the others."""
        with self._lock:
            self._process_group = None
            self._deliver(
                self._coordinator.receive(0, Gone(group_id=self.spec.group_id, rank=0, died=False, detail=""))
            )
            idle = not self._links
        if idle:
            self._server.close()

    def fail(self, error: RaycollectError, fade: Callable[[], None] = lambda: None) -> None:
        """Reports to current and late members that the group can't form; calls `fade` before the server ends."""
        with self._lock:
            self._fail(error)
        self._fading = threads.call_in_helper(threads.survives, self._fade, fade)

    def end(self) -> None:
        """Ends the server of a failed group now; returns when it has ended."""
        self._all_notified.set()
        if self._fading is not None:
            self._fading.result()

    def _fade(self, fade: Callable[[], None]) -> None:
        self._all_notified.wait(FADING_S)
        threads.survives(fade, place="removing the record of rank 0")
        self.close()

    def close(self) -> None:
        """Ends the coordinator, and rank 0's own process group."""
        self._server.close()
        process_group, self._process_group = self._process_group, None
        if process_group is not None:
            process_group.close()

    # ------------------------------------------------------------------------------------------ server's thread

    def opened(self, link: ControlLink) -> None:
        """Handles a connection of a member, or the liveness probe of another leader."""
        hello = link.hello
        with self._lock:
            if hello.get("probe"):
                self._show(link)
                return
            if self.complete or _name(hello) in self._notified:
                link.close()  # for the next group of this name, whose leader has not posted its address yet
                return
            if self._failed is None:
                problem = self._problem(hello)
                if not problem:
                    self._links[hello["rank"]] = link
                    self._who[hello["rank"]] = str(hello.get("who"))
                    link.send(Welcome(group_id=self.spec.group_id))
                    return
                self._fail(InvalidGroupError(group_name=self.spec.name, detail=problem))
            if self._failed is not None:
                self._refuse(link, self._failed)

    def received(self, link: ControlLink, message: Message) -> None:
        """Handles a message of a member."""
        with self._lock:
            rank = self._rank_of(link)
            if rank < 0:
                raise ProtocolError(detail=f"{type(message).__name__} from a connection that is not a member's")
            self._deliver(self._coordinator.receive(rank, message))

    def closed(self, link: ControlLink, reason: ChannelError) -> None:
        """Handles the end of a connection: its member has departed, or its process has ended."""
        with self._lock:
            rank = self._rank_of(link)
            if rank < 0:
                return
            del self._links[rank]
            self._notified.add(_name(link.hello))  # this member knows that it has left the group
            try:
                self._deliver(self._coordinator.lost(rank, reason.detail))
            except Exception as exc:  # noqa: BLE001 - members wait for the report
                self._fail(threads.failed("reporting a departed member", exc))
            idle = self._process_group is None and not self._links and self._failed is None
        if idle:
            self._server.close()

    def serve_data(self, link: DataLink) -> None:
        """Does nothing: tensors do not pass through the coordinator."""

    def _show(self, link: ControlLink) -> None:
        if self._failed is None and not self.complete:
            link.send(Welcome(group_id=""))
        else:
            link.close()
            self._all_notified.set()  # the other ranks follow the next leader

    def _problem(self, said: dict[str, Any]) -> str:
        rank, size, who = said.get("rank"), self.spec.world_size, said.get("who")
        mine = hello_of(self.spec, 0, "")
        for name in ("world_size", "backend", "options"):
            if said.get(name) != mine[name]:
                there, here = f"rank {rank} ({who})", f"rank 0 ({self._who[0]})"
                return f"{there} says that {name} is {shown(said.get(name))}, and {here} that it is {shown(mine[name])}"
        if not isinstance(rank, int) or not 0 <= rank < size:
            return f"rank {rank} ({who}) is not a rank of a group of {size}"
        return f"rank {rank} was taken twice: by {self._who[rank]} and by {who}" if rank in self._who else ""

    def _refuse(self, link: ControlLink, error: RaycollectError) -> None:
        self._notified.add(_name(link.hello))
        with suppress(ConnectionLostError):
            link.send(Refused(error=to_wire(error)))
        if len(self._notified) >= self.spec.world_size - 1:
            self._all_notified.set()

    def _fail(self, error: RaycollectError) -> None:
        if self._failed is not None:
            return
        self._failed = error
        if self.spec.world_size == 1:
            self._all_notified.set()
        for link in self._links.values():
            self._refuse(link, error)
        if self._process_group is not None:
            self._process_group.lost(error)

    def _rank_of(self, link: ControlLink) -> int:
        return next((rank for rank, other in self._links.items() if other is link), -1)

    def _deliver(self, orders: Orders) -> None:
        """Sends in order, under the lock, as these sends never wait.

        Rank 0 is last: its next work may hold the GIL, and the messages to the other ranks must be sent before.
        """
        denial: Met | None = None
        for rank, message in orders:
            link = self._links.get(rank)
            if link is None:
                continue
            with suppress(ConnectionLostError):  # `closed` deals with it
                try:
                    link.send(message)
                except ConnectionLostError:
                    raise
                except ProtocolError as exc:  # too long for a frame: the call fails, on rank 0 too
                    if not isinstance(message, Met):
                        raise
                    denial = replace(message, call=0, blobs=[], error=to_wire(exc))
                    link.send(denial)
        for rank, message in orders:
            if rank == 0 and self._process_group is not None:
                denied = denial if isinstance(message, Met) else None
                self._process_group.received(denied or message)


def _name(hello: dict[str, Any]) -> tuple[str, str]:
    return repr(hello.get("rank"))[:20], str(hello.get("who"))
