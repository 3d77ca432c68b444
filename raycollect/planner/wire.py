"""Programs as msgpack bytes, versioned; fields go by position, so a small program takes under 200 bytes.

An order is a ticket of 16 bytes, the keys, and a program. A loop sends the same programs again and again, so encoded
and decoded ones are cached; keys are bare bytes.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from functools import lru_cache
from operator import attrgetter
from typing import Any

import msgpack

from raycollect.core.model import KEY_NBYTES, Key, OpKind, ReduceOp
from raycollect.errors import ProtocolError
from raycollect.planner.program import Bundle, Domain, Program, Share, Task, Ticket
from raycollect.planner.template import Buffer, Choice, Local, Role, Step, Template

VERSION = 7
MOST_RANKS = 1 << 20
"""A larger number must not make the reader allocate for it."""
_HEAD = struct.Struct("<QQI")  # seq, predecessor, number of keys

# Fields in their order on the wire.
_TASK = ("share", "request", "inputs", "round", "alone")
_CHOICE = ("name", "at_least", "stepwise", "width")
_STEP_REST = ("peer", "level", "ranks", "at", "src_piece", "dst_piece")
_plain_rest = attrgetter(*_STEP_REST)


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
    keys = tuple(Key(data[at : at + KEY_NBYTES]) for at in range(_HEAD.size, end, KEY_NBYTES))
    program = decode_program(data[end:])
    if program.keys != count:
        raise ProtocolError(detail=f"{count} keys for a program of {program.keys}")
    return Ticket(seq, predecessor), keys, program


def encode_program(program: Program) -> bytes:
    """Encodes a program; the inverse of `decode_program`."""
    p = program
    tasks = list(map(attrgetter(*_TASK), p.tasks))
    bundles = [(b.tasks, b.base) for b in p.bundles]
    head = (VERSION, p.name, p.timeout_s, p.rounds, _plain_domain(p.agreement), p.keys, p.staging, p.commits)
    packed: bytes = msgpack.packb((*head, [_encode_share(share) for share in p.shares], tasks, bundles, p.everyone))
    return packed


def _plain_domain(domain: Domain) -> Any:
    ranks = domain.ranks
    whole = ranks[:1] == (0,) and ranks[-1] == len(ranks) - 1  # they ascend: 0 to n - 1
    return domain.group_id, domain.rank, len(ranks) if whole else ranks, domain.memory


@lru_cache(maxsize=1024)
def _encode_share(share: Share) -> bytes:
    domains = [_plain_domain(domain) for domain in share.domains]
    choices = list(map(attrgetter(*_CHOICE), share.choices))
    head = (share.op, domains, share.root, _plain_op(share.reduce_op), choices)
    packed: bytes = msgpack.packb((*head, _encode_template(share.template)))
    return packed


@lru_cache(maxsize=1024)
def _encode_template(template: Template) -> bytes:
    t = template
    buffers = [(b.role.value, b.source, b.scratch) for b in t.buffers]
    ways = [[(s.kind.value, s.src, s.dst, _plain_op(s.op), *_plain_rest(s)) for s in way] for way in t.ways]
    packed: bytes = msgpack.packb((buffers, ways, t.src, t.dst, t.result, t.boxes))
    return packed


def _plain_op(op: ReduceOp | None) -> int | None:
    return None if op is None else op.value


@lru_cache(maxsize=256)
def decode_program(data: bytes) -> Program:
    """Decodes a program; ProtocolError: the bytes are no program of this version."""
    try:
        values: list[Any] = msgpack.unpackb(data, use_list=False)
        if values[0] != VERSION:
            raise ProtocolError(
                detail=f"a program of version {values[0]}, this process reads {VERSION}: driver and actors must run "
                "the same raycollect"
            )
        _, name, timeout_s, rounds, agreement, keys, staging, commits, shares, tasks, bundles, everyone = values
        return Program(
            name=name,
            timeout_s=timeout_s,
            rounds=rounds,
            agreement=_domain(agreement),
            keys=keys,
            staging=staging,
            commits=commits,
            shares=tuple(map(_decode_share, shares)),
            tasks=tuple(Task(**dict(zip(_TASK, one, strict=True))) for one in tasks),
            bundles=tuple(Bundle(tasks=members, base=base) for members, base in bundles),
            everyone=everyone,
        )
    except (ValueError, TypeError, LookupError, msgpack.UnpackException) as exc:
        raise ProtocolError(detail=f"malformed program: {exc}") from exc


def _domain(values: Any) -> Domain:
    group_id, rank, ranks, memory = values
    if isinstance(ranks, int):
        if not 0 <= ranks <= MOST_RANKS:
            raise ValueError(f"{ranks} ranks")
        ranks = tuple(range(ranks))
    return Domain(group_id=group_id, rank=rank, ranks=ranks, memory=memory)


@lru_cache(maxsize=256)
def _decode_share(data: bytes) -> Share:
    op, domains, root, reduce_op, choices, template = msgpack.unpackb(data, use_list=False)
    return Share(
        op=OpKind(op).value,
        domains=tuple(map(_domain, domains)),
        root=root,
        reduce_op=None if reduce_op is None else ReduceOp(reduce_op),
        choices=tuple(Choice(**dict(zip(_CHOICE, one, strict=True))) for one in choices),
        template=_decode_template(template),
    )


@lru_cache(maxsize=256)
def _decode_template(data: bytes) -> Template:
    buffers, ways, src, dst, result, boxes = msgpack.unpackb(data, use_list=False)
    first, *others = [tuple(map(_step, way)) for way in ways]
    return Template(
        buffers=tuple(Buffer(role=Role(role), source=source, scratch=scratch) for role, source, scratch in buffers),
        steps=first,
        src=src,
        dst=dst,
        result=result,
        others=tuple(others),
        boxes=boxes,
    )


_KINDS: dict[str, OpKind | Local] = {kind.value: kind for kinds in (OpKind, Local) for kind in kinds}


def _step(values: Any) -> Step:
    kind, src, dst, op, *rest = values
    op = None if op is None else ReduceOp(op)
    return Step(kind=_KINDS[kind], src=src, dst=dst, op=op, **dict(zip(_STEP_REST, rest, strict=True)))
