"""Participants without Ray: each with a runtime of its own is like a process of its own."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from raycollect.core.model import Key
from raycollect.member.participant import Identity, Participant
from raycollect.member.runtime import Runtime

HOST = "127.0.0.1"


class NoTokens:
    """A pool where nobody tells when a value is gone."""

    def __init__(self, on_gone: Callable[[Key], None], *, supported: bool = True) -> None:
        self.supported = supported

    def take(self, key: Key) -> Any:
        return None


def participant(number: int = 0, runtime: Runtime | None = None, *, is_ordered: bool = True) -> Participant:
    """A participant with a server on a socket; who makes it closes it."""
    name = f"{number:032x}"
    identity = Identity(actor_id=name, actor=f"W{number}", host=HOST, incarnation=name, machine="here")
    made = Participant(runtime or Runtime(), identity, NoTokens)
    made.methods.described(is_ordered=is_ordered)
    return made


@contextmanager
def entered(made: Participant) -> Iterator[None]:
    """Methods that run inside the block are those of this participant."""
    made.runtime.part(Participant, lambda _: made)
    with made.runtime.entered():
        yield
