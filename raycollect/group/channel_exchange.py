"""The agreement of a plan's participants over the channel, for backends without a faster one."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any

from raycollect.channel.messages import Arrive
from raycollect.core.model import Launch
from raycollect.errors import CollectiveTimeoutError, PlanAbortedError


class ChannelExchange:
    """An `Exchange` through the controller, for backends without a faster one, and for plans without a common group.

    Args:
        group_id: The group; empty for the agreement of one plan.
        rank: This participant's rank, or its position in the plan.
        send: Sends a message to the controller.
    """

    def __init__(self, group_id: str, rank: int, send: Callable[[Any], None]) -> None:
        self._group_id = group_id
        self._rank = rank
        self._send = send
        self._changed = threading.Condition()
        self._rounds: dict[int, int] = {}
        self._parts: list[bytes] = []  # the parts received so far of an answer
        self._answers: dict[tuple[int, int], Sequence[bytes]] = {}
        self._aborted: set[int] = set()

    def __call__(self, launch: Launch, arrival: bytes) -> Sequence[bytes]:
        """Sends this rank's arrival and waits for the arrivals of all ranks."""
        seq = launch.seq
        number = self._rounds.get(seq, 0)
        self._rounds = {seq: number + 1}
        ranks = list(launch.ranks)
        self._send(Arrive(group_id=self._group_id, seq=seq, round=number, ranks=ranks, rank=self._rank, blob=arrival))
        with self._changed:
            self._changed.wait_for(lambda: (seq, number) in self._answers or seq in self._aborted, launch.timeout_s)
            answer = self._answers.pop((seq, number), None)  # a complete answer counts, even if an abort follows it
            if answer is None and seq in self._aborted:
                raise PlanAbortedError(detail="aborted in the consistency check")
            if answer is None:
                raise CollectiveTimeoutError(
                    detail="some ranks did not arrive at the consistency check", timeout_s=launch.timeout_s
                )
            self._aborted = {other for other in self._aborted if other >= seq}
            return answer

    def abort(self, seq: int) -> None:
        """Ends the waits of a launch, also later ones."""
        with self._changed:
            self._aborted.add(seq)
            self._changed.notify_all()

    def arrived(self, seq: int, number: int, blobs: Sequence[bytes], *, more: bool = False) -> None:
        """Handles an answer, on the channel's thread; the parts of an answer arrive in order."""
        self._parts += blobs
        if more:
            return
        with self._changed:
            self._answers = {place: blobs for place, blobs in self._answers.items() if place[0] >= seq}
            self._answers[seq, number], self._parts = self._parts, []
            self._changed.notify_all()
