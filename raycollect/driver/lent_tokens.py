"""The tokens that a controller lends to the methods of one participant, and how it tells which it has back (P5)."""

from __future__ import annotations

from collections.abc import Callable, Collection
from contextlib import suppress
from typing import Any

from raycollect.channel import Link
from raycollect.channel.messages import Unused
from raycollect.core import threads
from raycollect.core.model import Key
from raycollect.errors import ConnectionLostError, RaycollectError
from raycollect.pos import fetch
from raycollect.ray_bridge.call_tokens import CallTokens
from raycollect.ray_bridge.submitted_calls import SubmittedCalls


class LentTokens:
    """Lends tokens to the calls of a participant until `end`; the arguments are those of `ParticipantLink`."""

    def __init__(
        self,
        calls: SubmittedCalls,
        actor: Any,
        info: dict[str, Any],
        link: Link,
        *,
        owner: bytes,
        methods: Collection[str],
        soon: Callable[[Callable[[], None]], bool],
    ) -> None:
        self._calls = calls
        self._actor = actor
        self._info = info
        self._link = link
        self._tokens: CallTokens | None = CallTokens(actor, owner, methods, self._make, self._tell, soon)
        calls.tokens = self._tokens

    def end(self, call: Callable[[], None]) -> None:
        """Lends no more, and lets go of the actor; makes a call once nobody holds a value whose token was lent."""
        tokens, self._tokens, self._actor = self._tokens, None, None
        if tokens is None:
            return
        if self._calls.tokens is tokens:  # else the actor was leased again
            self._calls.tokens = None
        tokens.end(call)

    def _make(self, count: int) -> list[Any]:
        method = self._actor._raycollect_tokens
        return list(method.options(num_returns=count, max_task_retries=0, enable_task_events=False).remote(count))

    def _tell(self, keys: list[Key]) -> None:
        try:
            for at in range(0, len(keys), fetch.FREED_AT_ONCE):
                self._link.send(Unused(keys=[*keys[at : at + fetch.FREED_AT_ONCE]]))
        except ConnectionLostError:  # the participant may live: then it holds them until it hears
            threads.call_in_helper(threads.survives, _free, self._info, keys)


def _free(info: dict[str, Any], keys: list[Key]) -> None:
    """Frees values over a connection of its own.

    Not a method: the thread would hold the tokens, and the last to let go of refs while `ray.shutdown()` runs ends the
    process.
    """
    with suppress(RaycollectError):  # it is gone
        fetch.free(info["address"], keys, actor=info["actor"], incarnation=info["incarnation"])
