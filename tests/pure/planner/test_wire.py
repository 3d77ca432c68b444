"""Programs on the wire: what was written is read, and nothing else is."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import msgpack
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from raycollect.core.model import KEY_NBYTES, GroupSpec, Key, OpKind, ReduceOp, task_key
from raycollect.errors import ProtocolError
from raycollect.planner import (
    Bundle,
    Choice,
    Domain,
    Local,
    Program,
    Request,
    Role,
    Share,
    Step,
    Ticket,
    decode_order,
    decode_program,
    encode_order,
    encode_program,
    plan,
)
from raycollect.planner.program import Task
from raycollect.planner.template import Buffer, Template
from raycollect.planner.wire import VERSION

_INTS = st.integers(-(2**31), 2**31)
_INDEX = st.integers(-1, 5)
_OPS = st.none() | st.sampled_from(ReduceOp)
_RANKS = st.lists(_INTS, max_size=70).map(tuple)
_FEW = st.lists(_INTS, max_size=3).map(tuple)
_BUFFERS = st.builds(Buffer, role=st.sampled_from(Role), source=_INDEX, scratch=st.booleans())
_STEPS = st.builds(
    Step,
    kind=st.sampled_from(OpKind) | st.sampled_from(Local),
    src=_INDEX,
    dst=_INDEX,
    op=_OPS,
    peer=_INDEX,
    ranks=_FEW,
    at=st.integers(0, 9),
    src_piece=_INDEX,
    dst_piece=_INDEX,
)
_WAYS = st.lists(_STEPS, max_size=3).map(tuple)
_TEMPLATES = st.builds(
    Template,
    buffers=st.lists(_BUFFERS, max_size=3).map(tuple),
    steps=_WAYS,
    src=_INDEX,
    dst=_INDEX,
    result=_INDEX,
    others=st.lists(_WAYS, max_size=2).map(tuple),
)
_DOMAINS = st.builds(Domain, group_id=st.text(max_size=16), rank=_INTS, ranks=_RANKS)
_CHOICES = st.builds(
    Choice,
    name=st.text(max_size=12),
    at_least=st.integers(0, 2**62),
    width=st.integers(1, 2**20),
)
_SHARES = st.builds(
    Share,
    op=st.sampled_from([kind.value for kind in OpKind]),
    domain=_DOMAINS,
    root=_INTS,
    reduce_op=_OPS,
    template=_TEMPLATES,
    choices=st.lists(_CHOICES, min_size=1, max_size=2).map(tuple),
)
_TASKS = st.builds(Task, share=_INDEX, request=_INDEX, inputs=_FEW, round=_INDEX, alone=_INDEX)
_PROGRAMS = st.builds(
    Program,
    name=st.text(max_size=16),
    timeout_s=st.floats(allow_nan=False),
    rounds=st.integers(1, 3),
    agreement=_DOMAINS,
    shares=st.lists(_SHARES, max_size=2).map(tuple),
    tasks=st.lists(_TASKS, max_size=3).map(tuple),
    bundles=st.lists(st.builds(Bundle, tasks=_FEW, base=_FEW), max_size=3).map(tuple),
    everyone=st.lists(st.tuples(_FEW, _FEW), max_size=2).map(tuple),
    keys=st.integers(0, 4),
    staging=st.integers(0, 2**40),
)
_KEYS = st.binary(min_size=KEY_NBYTES, max_size=KEY_NBYTES).map(Key)


def _key(rank: int) -> Key:
    return task_key(bytes([rank + 1] * 24), 1)


def _typical() -> Program:
    group = GroupSpec(name="default", group_id="0123456789abcdef", backend="shm", world_size=4)
    operands = tuple((rank, _key(rank), None) for rank in range(4))
    request = Request(kind=OpKind.ALLREDUCE, group=group, operands=operands, op=ReduceOp.AVG, inplace=False)
    return plan([request]).program(2)


@given(_PROGRAMS)
def test_a_program_survives_the_wire(program: Program) -> None:
    found = decode_program(encode_program(program))
    assert found == program
    assert hash(found) == hash(program), "values are hashable: tuples, not lists"


def test_a_typical_program_takes_less_than_two_hundred_bytes_and_each_task_more_about_twenty() -> None:
    """Two thirds of them name the group, in the consistency check and in the share, and its ranks."""
    one = encode_program(_typical())
    assert len(one) < 180
    task, bundle = _typical().tasks[0], _typical().bundles[0]
    many = replace(_typical(), tasks=(task,) * 100, bundles=(replace(bundle, tasks=tuple(range(100))),))
    assert len(encode_program(many)) < len(one) + 99 * 20


def test_another_version_is_refused_naming_both() -> None:
    values = msgpack.unpackb(encode_program(_typical()))
    for version in (0, VERSION + 1, "1"):
        with pytest.raises(ProtocolError, match=rf"version {version}, this process reads {VERSION}"):
            decode_program(msgpack.packb([version, *values[1:]]))


@given(
    seq=st.integers(0, 2**64 - 1),
    predecessor=st.integers(0, 2**64 - 1),
    keys=st.lists(_KEYS, max_size=4),
)
def test_an_order_is_a_ticket_keys_and_a_program(seq: int, predecessor: int, keys: list[Key]) -> None:
    ticket, program = Ticket(seq, predecessor), replace(_typical(), keys=len(keys))
    data = encode_order(ticket, keys, encode_program(program))
    assert decode_order(data) == (ticket, tuple(keys), program)
    assert len(data) == 20 + KEY_NBYTES * len(keys) + len(encode_program(program))


@pytest.mark.parametrize("count", [0, 2, 2**32 - 1])
def test_keys_too_many_or_too_few_are_refused(count: int) -> None:
    program = encode_program(_typical())
    data = encode_order(Ticket(2, 1), [_key(0)], program)
    with pytest.raises(ProtocolError):
        decode_order(data[:16] + count.to_bytes(4, "little") + data[20:])
    if count <= 2:
        with pytest.raises(ProtocolError, match=f"{count} keys for a program of 1"):
            decode_order(encode_order(Ticket(2, 1), [_key(rank) for rank in range(count)], program))


@given(st.binary(max_size=300))
def test_junk_is_no_order(junk: bytes) -> None:
    with pytest.raises(ProtocolError):
        decode_order(junk)


def test_an_order_cut_short_is_refused_wherever_it_ends() -> None:
    data = encode_order(Ticket(2, 1), [_key(0)], encode_program(_typical()))
    for cut in range(len(data)):
        with pytest.raises(ProtocolError):
            decode_order(data[:cut])


@given(st.binary(max_size=300))
@example(b"\x80")  # an empty map
@example(b"\x90")  # an empty list
@example(b"\xc0")  # nil
@example(b"\x81\xa1t\x01")
def test_junk_is_a_protocol_error(junk: bytes) -> None:
    with pytest.raises(ProtocolError):
        decode_program(junk)


_LEAVES = st.none() | st.booleans() | st.integers(-(2**63), 2**64 - 1) | st.text(max_size=9) | st.binary(max_size=30)
_PLAIN: st.SearchStrategy[Any] = st.recursive(
    _LEAVES, lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=5), inner, max_size=3)
)


@given(_PLAIN)
def test_any_other_message_is_a_protocol_error(value: Any) -> None:
    with pytest.raises(ProtocolError):
        decode_program(msgpack.packb(value))
