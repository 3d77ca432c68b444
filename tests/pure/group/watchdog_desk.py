"""What a watchdog asks of ranks and is told, without a group."""

from __future__ import annotations

import time
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

from raycollect.channel.messages import Answer, Ask, Message
from raycollect.group.coordinator_client import ActiveCall, RankPosition
from raycollect.group.group_member import GroupMember
from raycollect.group.watchdog import Watchdog

HERE = RankPosition("generation", 4)


class Desk:
    """The watchdog of rank 0 of three, or of another one."""

    def __init__(self, rank: int = 0) -> None:
        spec: Any = SimpleNamespace(name="g", group_id="id", world_size=3)
        self.member = GroupMember(spec, rank, self.send, members=("W(0)", "W(1)", "W(2)"))
        self.sent: list[Any] = []
        self.on_send: Callable[[Any], None] = lambda message: None
        ranks = (0, 1, 2)
        call = ActiveCall(5, "allreduce", time.monotonic() - 2.5, 30.0)
        self.client: Any = SimpleNamespace(name="all", ranks=ranks, call=call, position=HERE)
        self.watchdog = Watchdog(self.member)
        self.watchdog.clients["all"] = self.client

    def send(self, message: Message) -> None:
        assert isinstance(message, Ask | Answer)
        self.sent.append(message)
        self.on_send(message)

    def ask(self, ranks: list[int]) -> tuple[Any, ...]:
        """What `reports` gives where these are late."""
        return self.watchdog.reports(self.client, ranks, HERE)
