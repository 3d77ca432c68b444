"""What a watchdog asks of ranks and is told, without a group."""

from __future__ import annotations

import time
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

from raycollect.channel.messages import Answer, Ask, Message
from raycollect.group.member_communicator import Standing
from raycollect.group.watchdog import Watchdog

HERE = Standing("generation", 4)


class Desk:
    """A process group: rank 0 of three, or another one."""

    def __init__(self, rank: int = 0) -> None:
        self.spec: Any = SimpleNamespace(name="g", group_id="id", world_size=3)
        self.rank = rank
        self.members: tuple[str, ...] = ("W(0)", "W(1)", "W(2)")
        self.sent: list[Any] = []
        self.on_send: Callable[[Any], None] = lambda message: None
        ranks = (0, 1, 2)
        self.the_communicator: Any = SimpleNamespace(
            name="all", ranks=ranks, op="allreduce", call=5, since_s=time.monotonic() - 2.5, standing=HERE
        )
        self.watchdog = Watchdog(self)

    def send(self, message: Message) -> None:
        assert isinstance(message, Ask | Answer)
        self.sent.append(message)
        self.on_send(message)

    def communicator(self, name: str) -> Any:
        assert name == "all"
        return self.the_communicator

    @property
    def communicators(self) -> list[Any]:
        return [self.the_communicator]

    def actor(self, rank: int) -> str:
        return self.members[rank] if self.members else ""

    def asked(self, ranks: list[int]) -> tuple[Any, ...]:
        """What `reports` gives where these are late."""
        return self.watchdog.reports(self.the_communicator, ranks, HERE)


QUESTION = Ask(group_id="id", communicator="all", ranks=[1])
