"""Changed copies of frozen values."""

import dataclasses
from typing import TypeVar

import msgspec

from raycollect.core.model import Address, Member

_Value = TypeVar("_Value")


def replace(value: _Value, /, **changes: object) -> _Value:
    """The same with other fields; a dataclass, or a Struct of msgspec."""
    if isinstance(value, msgspec.Struct):
        return msgspec.structs.replace(value, **changes)
    return dataclasses.replace(value, **changes)  # type: ignore[type-var]


def named_member(actor: str, rank: int = 0, *, actor_id: str = "", ordered: bool = True) -> Member:
    """A member of a group of which nobody asks where it is."""
    return Member(
        rank=rank,
        actor_id=actor_id,
        actor=actor,
        address=Address(host="", port=0, secret=b""),
        machine="",
        node_id="",
        pid=0,
        incarnation="",
        ordered=ordered,
    )
