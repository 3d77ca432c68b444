"""Programs on the wire: what was written is read, and nothing else is."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from raycollect.core.model import KEY_NBYTES, GroupSpec, Key, OpKind, ReduceOp, task_key
from raycollect.errors import ProtocolError
from raycollect.planner import (
    Domain,
    Program,
    Request,
    Ticket,
    decode_order,
    decode_program,
    encode_order,
    encode_program,
    plan,
)
from raycollect.planner.program import MOST_RANKS
from tests.support.values import replace

_KEYS = st.binary(min_size=KEY_NBYTES, max_size=KEY_NBYTES).map(Key)


def _key(rank: int) -> Key:
    return task_key(bytes([rank + 1] * 24), 1)


def _typical() -> Program:
    group = GroupSpec(name="default", group_id="0123456789abcdef", backend="shm", world_size=4)
    operands = tuple((rank, _key(rank), None) for rank in range(4))
    request = Request(kind=OpKind.ALLREDUCE, group=group, operands=operands, op=ReduceOp.AVG, inplace=False)
    return plan([request]).program(2)


@pytest.mark.parametrize("ranks", [(), (0,), (1,), (0, 1, 2), (0, 2), (0, 1, 3), (1, 2), tuple(range(1000))])
def test_ranks_survive_the_wire_and_take_little_room(ranks: tuple[int, ...]) -> None:
    data = encode_program(replace(_typical(), agreement=Domain.of("g", 0, ranks)))
    assert decode_program(data).agreement.ranks == ranks
    assert len(data) < 190


@pytest.mark.parametrize("tasks", [1, 50_000])
def test_a_loop_gets_one_program_for_equal_bytes(tasks: int) -> None:
    """Caches of runs know it by its identity."""
    program = replace(_typical(), tasks=_typical().tasks * tasks)
    data = encode_program(program)
    assert decode_program(data) is decode_program(bytes(bytearray(data)))
    assert decode_program(data) == program


@pytest.mark.parametrize("members", [-1, MOST_RANKS + 1])
def test_a_number_of_ranks_that_can_not_be_is_refused(members: int) -> None:
    with pytest.raises(ProtocolError):
        decode_program(encode_program(replace(_typical(), agreement=Domain(group_id="g", rank=0, members=members))))


def test_a_typical_program_takes_less_than_two_hundred_bytes_and_each_task_more_about_twenty() -> None:
    """Two thirds of them name the group, in the consistency check and in the share, and its ranks."""
    one = encode_program(_typical())
    assert len(one) < 180
    task, bundle = _typical().tasks[0], _typical().bundles[0]
    many = replace(_typical(), tasks=(task,) * 100, bundles=(replace(bundle, tasks=tuple(range(100))),))
    assert len(encode_program(many)) < len(one) + 99 * 20


@pytest.mark.parametrize("op", [b"", b"allreduce_", b"ALLREDUCE"])
def test_an_operation_that_nobody_knows_is_refused(op: bytes) -> None:
    named, other = b"\xa9allreduce\x91", bytes([0xA0 + len(op)]) + op + b"\x91"  # the tasks follow
    data = encode_program(_typical())
    assert data.count(named) == 1
    with pytest.raises(ProtocolError):
        decode_program(data.replace(named, other))


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
