"""Programs on the wire: what was written is read, and nothing else is."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import msgpack
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from raycollect.errors import ProtocolError
from raycollect.model import KEY_NBYTES, GroupSpec, Key, OpKind, ReduceOp, task_key
from raycollect.planner import (
    Buffer,
    Program,
    Request,
    Role,
    Step,
    Template,
    Ticket,
    decode_order,
    decode_program,
    encode_order,
    encode_program,
    plan,
)
from raycollect.planner.wire import VERSION

CALM = settings(deadline=None)  # the machine's load is none of these tests' business

_INTS = st.integers(-(2**31), 2**31)
_INDEX = st.integers(-1, 5)
_OPS = st.none() | st.sampled_from(ReduceOp)
_TEMPLATES = st.builds(
    Template,
    buffers=st.lists(
        st.builds(Buffer, role=st.sampled_from(Role), source=_INDEX, scratch=st.booleans()), max_size=3
    ).map(tuple),
    steps=st.lists(
        st.builds(Step, kind=st.sampled_from(OpKind), src=_INDEX, dst=_INDEX, op=_OPS, peer=_INDEX), max_size=3
    ).map(tuple),
    src=_INDEX,
    dst=_INDEX,
    result=_INDEX,
)
_PROGRAMS = st.builds(
    Program,
    op=st.sampled_from([kind.value for kind in OpKind]),
    group_id=st.text(max_size=16),
    rank=_INTS,
    ranks=st.lists(_INTS, max_size=70).map(tuple),
    root=_INTS,
    reduce_op=_OPS,
    timeout_s=st.floats(allow_nan=False),
    rounds=st.integers(1, 2),
    keys=st.lists(st.binary(min_size=KEY_NBYTES, max_size=KEY_NBYTES).map(Key), max_size=3).map(tuple),
    template=_TEMPLATES,
)


def _typical() -> Program:
    group = GroupSpec(name="default", group_id="0123456789abcdef", backend="shm", world_size=4)
    operands = tuple((rank, task_key(bytes([rank + 1] * 24), 1), None) for rank in range(4))
    request = Request(kind=OpKind.ALLREDUCE, group=group, operands=operands, op=ReduceOp.AVG, inplace=False)
    return plan(request).program(2)


@CALM
@given(_PROGRAMS)
def test_a_program_survives_the_wire(program: Program) -> None:
    found = decode_program(encode_program(program))
    assert found == program
    assert hash(found) == hash(program), "values are hashable: tuples, not lists"


def test_types_survive_the_wire() -> None:
    found = decode_program(encode_program(_typical()))
    assert type(found.keys[0]) is bytes
    assert found.reduce_op is ReduceOp.AVG
    assert found.template.steps[0].kind is OpKind.ALLREDUCE
    assert found.template.buffers[1].role is Role.LIKE


def test_a_typical_program_takes_about_a_hundred_bytes() -> None:
    assert len(encode_program(_typical())) < 150


def test_another_version_is_refused_naming_both() -> None:
    values = msgpack.unpackb(encode_program(_typical()))
    for version in (0, VERSION + 1, "1"):
        with pytest.raises(ProtocolError, match=rf"version {version}, this process reads {VERSION}"):
            decode_program(msgpack.packb([version, *values[1:]]))


@pytest.mark.parametrize("length", [0, KEY_NBYTES - 1, KEY_NBYTES + 1])
def test_a_key_of_the_wrong_length_is_refused(length: int) -> None:
    program = replace(_typical(), keys=(Key(bytes(length)),))
    with pytest.raises(ProtocolError, match="key"):
        decode_program(encode_program(program))


def test_a_truncated_program_is_refused_wherever_it_ends() -> None:
    data = encode_program(_typical())
    for cut in range(len(data)):
        with pytest.raises(ProtocolError):
            decode_program(data[:cut])


@pytest.mark.parametrize("op", ["", "allreduce_", "ALLREDUCE"])
def test_an_operation_that_nobody_knows_is_refused(op: str) -> None:
    with pytest.raises(ProtocolError):
        decode_program(encode_program(replace(_typical(), op=op)))


def test_bytes_after_the_program_are_refused() -> None:
    with pytest.raises(ProtocolError):
        decode_program(encode_program(_typical()) + b"\x00")


@pytest.mark.parametrize("at", range(11))
def test_a_field_too_few_is_refused(at: int) -> None:
    values = msgpack.unpackb(encode_program(_typical()))
    assert len(values) == 11
    with pytest.raises(ProtocolError):
        decode_program(msgpack.packb(values[:at] + values[at + 1 :]))


@CALM
@given(seq=st.integers(0, 2**64 - 1), predecessor=st.integers(0, 2**64 - 1), program=_PROGRAMS)
def test_an_order_is_a_ticket_and_a_program(seq: int, predecessor: int, program: Program) -> None:
    ticket = Ticket(seq, predecessor)
    data = encode_order(ticket, encode_program(program))
    assert decode_order(data) == (ticket, program)
    assert len(data) == 16 + len(encode_program(program))


@CALM
@given(st.binary(max_size=300))
def test_junk_is_no_order(junk: bytes) -> None:
    with pytest.raises(ProtocolError):
        decode_order(junk)


def test_an_order_cut_short_is_refused_wherever_it_ends() -> None:
    data = encode_order(Ticket(2, 1), encode_program(_typical()))
    for cut in range(len(data)):
        with pytest.raises(ProtocolError):
            decode_order(data[:cut])


@CALM
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


@CALM
@given(_PLAIN)
def test_any_other_message_is_a_protocol_error(value: Any) -> None:
    with pytest.raises(ProtocolError):
        decode_program(msgpack.packb(value))


@CALM
@given(at=st.integers(1, 10), value=_PLAIN)
def test_a_field_of_any_other_value_gives_a_program_or_a_protocol_error(at: int, value: Any) -> None:
    values = msgpack.unpackb(encode_program(_typical()))
    values[at] = value
    try:
        assert isinstance(decode_program(msgpack.packb(values)), Program)
    except ProtocolError:
        pass


@CALM
@given(at=st.integers(0, len(encode_program(_typical())) - 1), byte=st.integers(0, 255))
def test_a_flipped_byte_gives_a_program_or_a_protocol_error(at: int, byte: int) -> None:
    data = bytearray(encode_program(_typical()))
    data[at] = byte
    try:
        assert isinstance(decode_program(bytes(data)), Program)
    except ProtocolError:
        pass
