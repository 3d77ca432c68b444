"""Programs and orders as bytes. An order is a ticket of 16 bytes, the keys, and a program.

A loop sends the same programs again and again, so decoded ones are cached; keys are bare bytes.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Sequence
from typing import Any

from raycollect.core.codec import MEMORY_PER_BYTE, Codec
from raycollect.core.model import KEY_NBYTES, Key
from raycollect.core.weighted_cache import WeightedCache
from raycollect.errors import ProtocolError
from raycollect.planner.program import Program, Ticket

VERSION = 9
_HEAD = struct.Struct("<QQI")  # seq, predecessor, number of keys
_PROGRAMS = Codec[Program](Program, "program", version=VERSION)


def encode_order(ticket: Ticket, keys: Sequence[Key], program: bytes) -> bytes:
    """Puts a ticket and keys before an encoded program; the inverse of `decode_order`."""
    return b"".join((_HEAD.pack(ticket.seq, ticket.predecessor, len(keys)), *keys, program))


def decode_order(data: bytes) -> tuple[Ticket, tuple[Key, ...], Program]:
    """Reads a ticket, keys and their program; ProtocolError: the bytes are malformed."""
    if len(data) < _HEAD.size:
        raise ProtocolError(detail="a dispatch without a ticket")
    seq, predecessor, count = _HEAD.unpack_from(data)
    end = _HEAD.size + count * KEY_NBYTES
    if len(data) < end:
        raise ProtocolError(detail=f"a dispatch of {len(data)} bytes with {count} keys")
    keys: list[Any] = []  # of `Key`, which is a name for `bytes`
    for at in range(_HEAD.size, end, KEY_NBYTES):
        keys.append(data[at : at + KEY_NBYTES])  # noqa: PERF401 - a comprehension takes longer
    program = decode_program(data[end:])
    if program.keys != count:
        raise ProtocolError(detail=f"{count} keys for a program of {program.keys}")
    return Ticket(seq, predecessor), tuple(keys), program


encode_program: Callable[[Program], bytes] = _PROGRAMS.encode


decode_program: Callable[[bytes], Program]
decode_program = WeightedCache[bytes, Program](
    _PROGRAMS.decode, lambda data, program: MEMORY_PER_BYTE * len(data), 64 << 20
)
"""Reads the bytes of `encode_program`; raises ProtocolError if malformed. Equal bytes are one object while cached."""
