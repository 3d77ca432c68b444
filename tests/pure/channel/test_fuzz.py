"""What one who can seal payloads can say, at random: never another error, a hang, or much memory.

Every case is made from a seed that the test's name or its message tells. What a wire without the key can do is in
`test_protocol`, and over sockets in `test_fuzz_sockets`; what the holder of the key may say is in `test_fuzz_peers`.
"""

from __future__ import annotations

import random
import tracemalloc
import typing
from contextlib import suppress
from typing import Any

import msgpack
import pytest

from raycollect.channel.messages import Message, decode, encode
from raycollect.channel.protocol import MAX_FRAME_NBYTES, State
from raycollect.errors import ProtocolError
from tests.pure.channel.hostile_wire import message
from tests.pure.channel.wire import Wire

SEEDS = range(6)


def _nested(depth: int, *, key: bytes = b"") -> bytes:
    return (b"\x91" if not key else b"\x81" + key) * depth + b"\xc0"


def _hostile(rng: random.Random) -> bytes:
    """A payload, from one who can seal it."""
    base = bytearray(encode(message(rng)))
    kind = rng.randrange(8)
    if kind == 0:
        return rng.randbytes(rng.choice((0, 1, 10, 1000)))
    if kind == 1:
        for _ in range(rng.choice((1, 1, 3))):
            base[rng.randrange(len(base))] = rng.randrange(256)
        return bytes(base)
    if kind == 2:
        return bytes(base[: rng.randrange(len(base))])
    if kind == 3:  # a header that lies about what follows
        header = rng.choice((b"\xdd", b"\xdf", b"\xc6", b"\xdb", b"\xc9"))
        lie = header + rng.choice((2**32 - 1, 2**31, 65_537)).to_bytes(4, "big")
        return rng.choice((b"\x91", b"\x95\xa4Done", b"\x93\xa6Joined", b"")) + lie + rng.randbytes(10)
    if kind == 4:
        depth = rng.choice((10, 400, 510, 512, 900, 1000, 1023, 1024, 5000, 100_000))
        return rng.choice((b"", b"\x91", b"\x95\xa4Done", b"\x93\xa6Joined\x81\xa1x")) + _nested(
            depth, key=rng.choice((b"", b"\xa1t"))
        )
    if kind == 5:
        return bytes(base) + rng.randbytes(rng.choice((1, 2, 50)))
    if kind == 6:  # the right fields, the wrong types
        cls = type(message(rng))
        names = cls.__struct_fields__
        odd = [None, True, -1, 2**64 - 1, 1.5, "x", b"x", [], [[]], {}, {"x": 1}, [None], "\0" * 1000]
        return typing.cast(bytes, msgpack.packb([cls.__name__, *(rng.choice(odd) for _ in names)]))
    keys: list[Any] = [1, b"t", "t", None, 1.5, True, "seq"]
    return typing.cast(bytes, msgpack.packb([{rng.choice(keys): rng.choice(keys)} for _ in range(3)]))


@pytest.mark.parametrize("seed", SEEDS)
def test_a_sealed_payload_is_a_message_of_the_table_or_ends_the_connection(seed: int) -> None:
    for case in range(300):
        rng = random.Random(f"{seed}/{case}")
        payload = _hostile(rng)
        wire = Wire(purpose=rng.choice(("control", "data"))).open()
        peer, end = rng.choice(((wire.client, wire.server), (wire.server, wire.client)))
        frame = len(payload).to_bytes(4, "big") + peer._outward.tag(payload) + payload
        try:
            (got,) = end.receive(frame)
        except ProtocolError:
            assert end.state is State.CLOSED, (seed, case)
        else:
            assert isinstance(got, Message), (seed, case)
            again = decode(encode(got))
            assert encode(again) == encode(got), (seed, case)


@pytest.mark.parametrize("begins", [b"", b"\x91", b"\x93\xa6Joined\x81\xa1x"])
@pytest.mark.parametrize(
    "rest",
    [
        *(head + b"\xff" * 5 for head in (b"\xdd", b"\xdf", b"\xc6", b"\xdb", b"\xc9")),
        *(_nested(depth) for depth in (100, 1000, 5000, MAX_FRAME_NBYTES - 50)),
        *(_nested(depth, key=b"\xa1t") for depth in (1000, 5000)),
    ],
    ids=lambda rest: f"{rest[:1]!r} {len(rest)}",
)
def test_lies_and_depth_cost_little_memory(begins: bytes, rest: bytes) -> None:
    tracemalloc.start()
    try:
        with suppress(ProtocolError):  # a few levels are read
            decode(begins + rest)
            assert len(rest) == 101
        assert tracemalloc.get_traced_memory()[1] < 2 * MAX_FRAME_NBYTES
    finally:
        tracemalloc.stop()
