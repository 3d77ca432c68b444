"""Messages of any kind, and what a hostile wire makes of a stream of them."""

from __future__ import annotations

import random
import typing
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from raycollect.channel.messages import MESSAGES, Message
from raycollect.channel.protocol import MAX_FRAME_NBYTES, MAX_HANDSHAKE_NBYTES
from raycollect.core.model import GroupSpec, Member
from tests.support.values import named_member


def message(rng: random.Random, cls: type[Message] | None = None) -> Message:
    """Any message of the table, with values of the right types."""
    cls = cls or MESSAGES[rng.choice(sorted(set(MESSAGES) - {"Fetched"}))]
    hints = typing.get_type_hints(cls)
    return cls(**{name: value(rng, hints[name]) for name in sorted({*cls.__struct_fields__} - {"blob_nbytes"})})


def value(rng: random.Random, hint: Any) -> Any:
    """Any value of a field's type; now and then one at the edge of what it can be."""
    origin, args = typing.get_origin(hint), typing.get_args(hint)
    if type(None) in args:
        return None if rng.random() < 0.3 else value(rng, args[0])
    if origin is tuple and args[1:] != (Ellipsis,):
        return tuple(value(rng, one) for one in args)
    if origin in (list, tuple):
        return origin(value(rng, args[0]) for _ in range(rng.choice((0, 1, 2, 5))))
    if origin is dict:
        return {rng.choice(("type", "fields", "name", "x")): rng.choice((None, -1, "x", [], {})) for _ in range(3)}
    plain: dict[Any, Callable[[], Any]] = {
        int: lambda: rng.choice((0, 1, 2, -1, 2**31, 2**63, -(2**63), rng.randrange(10))),
        float: lambda: rng.choice((0.0, -1.0, 1e-9, float("inf"), rng.random())),
        bool: lambda: rng.random() < 0.5,
        GroupSpec: lambda: GroupSpec(
            name="g", group_id="id of left", backend="shm", world_size=rng.choice((1, 2, 2**62))
        ),
        Member: lambda: named_member("W", rng.choice((0, -1))),
        str: lambda: rng.choice(("", "g", "all", "0>1", "9>9", "x" * 300, "\0", "𝄞")),
        bytes: lambda: rng.randbytes(rng.choice((0, 1, 16, 28, 500))),
    }
    if hint not in plain:  # a part of a message
        return hint(**{name: value(rng, one) for name, one in typing.get_type_hints(hint).items()})
    return plain[hint]()


def changed(rng: random.Random, units: Sequence[bytes], foreign: Sequence[bytes]) -> list[bytes]:
    """The units of a stream, after one thing was done to them.

    Args:
        rng: What decides.
        units: The true ones.
        foreign: What was said elsewhere: by this end itself, or in another connection.
    """
    made = list(units)
    at = rng.randrange(len(made))
    one = bytearray(made[at])
    place = rng.randrange(len(one) + 1)
    kind = rng.choice(("flip", "flip", "cut", "end", "swap", "repeat", "drop", "insert", "announce", "foreign", "zero"))
    if kind == "flip" and one:
        one[place % len(one)] ^= 1 << rng.randrange(8)
        made[at] = bytes(one)
    elif kind == "cut":
        made[at] = bytes(one[:place])
    elif kind == "end":
        made[at:] = [bytes(one[:place])]
    elif kind == "swap":
        other = rng.randrange(len(made))
        made[at], made[other] = made[other], made[at]
    elif kind == "repeat":
        made.insert(rng.randrange(at, len(made)) + 1, made[at])
    elif kind == "drop":
        del made[at]
    elif kind == "insert":
        made[at] = bytes(one[:place]) + rng.randbytes(rng.choice((1, 4, 20, 5000))) + bytes(one[place:])
    elif kind == "announce":
        limits = (0, 1, MAX_HANDSHAKE_NBYTES, MAX_HANDSHAKE_NBYTES + 1, MAX_FRAME_NBYTES, MAX_FRAME_NBYTES + 1)
        one[:4] = rng.choice((*limits, 2**32 - 1, rng.getrandbits(32))).to_bytes(4, "big")
        made[at] = bytes(one)
    elif kind == "foreign":
        made[at] = rng.choice(foreign)
    elif kind == "zero":
        made[at] = bytes(len(one))
    return made


def chunks(rng: random.Random, stream: bytes) -> Iterator[bytes]:
    """The stream, in pieces as a socket may give them."""
    most = rng.choice((1, 7, 100, 5000, 1 << 20))
    at = 0
    while at < len(stream):
        step = rng.randint(1, most)
        yield stream[at : at + step]
        at += step
