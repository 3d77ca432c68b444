"""Program <-> msgpack bytes, versioned. Positional, so that a small program is about a hundred bytes.

A dispatch is a ticket of 16 bytes and a program. A loop sends the same programs again and again, so these are encoded
and decoded once, and remembered.
"""

from __future__ import annotations

import struct
from functools import lru_cache
from typing import Any

import msgpack

from raycollect.errors import ProtocolError
from raycollect.model import KEY_NBYTES, Key, OpKind, ReduceOp
from raycollect.planner.ir import Buffer, Program, Role, Step, Template, Ticket

VERSION = 2
_TICKET = struct.Struct("<QQ")


def encode_order(ticket: Ticket, program: bytes) -> bytes:
    """Puts a ticket before an encoded program; the inverse of `decode_order`."""
    return _TICKET.pack(ticket.seq, ticket.predecessor) + program


def decode_order(data: bytes) -> tuple[Ticket, Program]:
    """Reads a ticket and its program.

    Raises:
        ProtocolError: The bytes are no such thing.
    """
    if len(data) < _TICKET.size:
        raise ProtocolError(detail="a dispatch without a ticket")
    return Ticket(*_TICKET.unpack_from(data)), decode_program(data[_TICKET.size :])


def encode_program(program: Program) -> bytes:
    """Writes a program; the inverse of `decode_program`."""
    p = program
    reduce_op = None if p.reduce_op is None else p.reduce_op.value
    head = (VERSION, p.op, p.group_id, p.rank, p.ranks, p.root, reduce_op, p.timeout_s, p.rounds)
    packed: bytes = msgpack.packb((*head, p.keys, _encode_template(p.template)))
    return packed


@lru_cache(maxsize=256)
def _encode_template(template: Template) -> bytes:
    buffers = [(b.role.value, b.source, b.scratch) for b in template.buffers]
    steps = [(s.kind.value, s.src, s.dst, None if s.op is None else s.op.value, s.peer) for s in template.steps]
    packed: bytes = msgpack.packb((buffers, steps, template.src, template.dst, template.result))
    return packed


@lru_cache(maxsize=256)
def decode_program(data: bytes) -> Program:
    """Reads a program.

    Raises:
        ProtocolError: The bytes are no program of this version.
    """
    try:
        values: list[Any] = msgpack.unpackb(data)
        if values[0] != VERSION:
            raise ProtocolError(
                detail=f"a program of version {values[0]}, this process reads {VERSION}: driver and actors must run "
                "the same raycollect"
            )
        _, op, group_id, rank, ranks, root, reduce_op, timeout_s, rounds, keys, template = values
        if any(len(key) != KEY_NBYTES for key in keys):
            raise ProtocolError(detail="a key of the wrong length")
        return Program(
            op=OpKind(op).value,
            group_id=group_id,
            rank=rank,
            ranks=tuple(ranks),
            root=root,
            reduce_op=None if reduce_op is None else ReduceOp(reduce_op),
            timeout_s=timeout_s,
            rounds=rounds,
            keys=tuple(Key(key) for key in keys),
            template=_decode_template(template),
        )
    except (ValueError, TypeError, LookupError, msgpack.UnpackException) as exc:
        raise ProtocolError(detail=f"malformed program: {exc}") from exc


@lru_cache(maxsize=256)
def _decode_template(data: bytes) -> Template:
    buffers, steps, src, dst, result = msgpack.unpackb(data)
    return Template(
        buffers=tuple(Buffer(role=Role(role), source=source, scratch=scratch) for role, source, scratch in buffers),
        steps=tuple(
            Step(kind=OpKind(kind), src=read, dst=written, op=None if op is None else ReduceOp(op), peer=peer)
            for kind, read, written, op, peer in steps
        ),
        src=src,
        dst=dst,
        result=result,
    )
