"""Dicts of so many tensors that their description travels in parts, and by its digest in later runs."""

from __future__ import annotations

import hashlib
import random
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import numpy as np
import pytest

from raycollect.channel.protocol import MAX_FRAME_NBYTES
from raycollect.core.codec import MOST_NBYTES
from raycollect.core.model import OpKind
from raycollect.core.protocols import ARRIVAL_NBYTES
from raycollect.engine.agreement import Arrival, Spec, encode_arrival
from raycollect.engine.long_arrivals import exchange, messages_of, whole
from raycollect.engine.operands import Bound
from raycollect.errors import MismatchError, ProtocolError, RaycollectError, UnsupportedError, Violation
from raycollect.planner import Request
from raycollect.pos import tensors
from tests.pure.engine.convoys import allreduces, convoy_of
from tests.pure.fleet import WAIT_S, Convoy, Fleet, contain

WORLD, COUNT = 3, 2500
NAMES = [hashlib.sha256(str(at).encode()).hexdigest() for at in range(COUNT)]  # which hardly compress


@pytest.fixture(params=["shm", "tcp"])
def convoy(request: pytest.FixtureRequest) -> Iterator[Convoy]:
    with convoy_of(WORLD, request.param) as convoy:
        yield convoy


def model(value: float, make: Any = np.zeros) -> dict[str, Any]:
    arrays = {name: make(1 + at % 3, np.float32 if at % 2 else np.float64) for at, name in enumerate(NAMES)}
    for array in arrays.values():
        array[...] = value
    return arrays


def description(value: dict[str, Any]) -> bytes:
    bound = Bound(contain(value), tuple(value.values()))
    return encode_arrival(Arrival(spec=Spec(op="broadcast", gives=bound.side)))


def broadcast(convoy: Convoy, keys: Sequence[Any]) -> dict[int, Any]:
    """The errors by rank."""
    (membership,) = convoy.memberships
    operands = tuple((rank, key if rank == 0 else None, None if rank == 0 else key) for rank, key in enumerate(keys))
    request = Request(kind=OpKind.BROADCAST, group=membership.spec, operands=operands, root=0, timeout_s=WAIT_S)
    return {one: outcome.error for one, outcome in convoy.run([request], [membership]).items() if outcome.error}


def holds(some: dict[str, Any], value: float) -> bool:
    return all((array == value).all() for array in some.values())


@pytest.mark.parametrize("make", [np.zeros, tensors.zeros], ids=["plain", "shared"])
def test_a_loop_over_a_large_dict_sends_the_current_values(convoy: Convoy, make: Any) -> None:
    models = [model(rank, make) for rank in range(WORLD)]
    keys = [convoy.keep(rank, one) for rank, one in enumerate(models)]
    assert len(description(models[0])) > ARRIVAL_NBYTES
    for value in (7, 8, 9):
        for array in models[0].values():
            array[...] = value
        assert broadcast(convoy, keys) == {}
        assert all(holds(one, value) for one in models)


def test_a_rank_that_comes_with_another_dict_gets_the_parts_again(convoy: Convoy) -> None:
    models = [model(rank) for rank in range(WORLD)]
    keys = [convoy.keep(rank, one) for rank, one in enumerate(models)]
    for _ in range(2):
        assert broadcast(convoy, keys) == {}
    other = model(5)
    assert broadcast(convoy, [*keys[:2], convoy.keep(2, other)]) == {}
    assert holds(other, 0)
    assert broadcast(convoy, keys) == {}


@pytest.mark.parametrize("runs", [0, 2])
@pytest.mark.parametrize("at", [0, COUNT - 1])
def test_one_other_tensor_of_a_large_dict_is_named(convoy: Convoy, at: int, runs: int) -> None:
    models = [model(rank) for rank in range(WORLD)]
    keys = [convoy.keep(rank, one) for rank, one in enumerate(models)]
    for _ in range(runs):
        assert broadcast(convoy, keys) == {}
    odd = model(5)
    odd[NAMES[at]] = np.full(4, 5, odd[NAMES[at]].dtype)
    errors = broadcast(convoy, [keys[0], convoy.keep(1, odd), keys[2]])
    assert {type(error) for error in errors.values()} == {MismatchError}
    assert len(errors) == WORLD
    for error in errors.values():
        (violation,) = error.violations
        assert (violation.rank, violation.field) == (1, "shape")
        assert violation.found.startswith(f"(from {at} on, ['{NAMES[at]}']) [4]")
    assert holds(odd, 5), "nothing was written"
    assert broadcast(convoy, keys) == {}


def test_a_dict_without_one_name_is_refused_on_all_ranks(convoy: Convoy) -> None:
    models = [model(rank) for rank in range(WORLD)]
    del models[2][NAMES[100]]
    errors = broadcast(convoy, [convoy.keep(rank, one) for rank, one in enumerate(models)])
    assert {type(error) for error in errors.values()} == {MismatchError}
    assert len(errors) == WORLD


@pytest.mark.parametrize("backend", ["shm", "tcp"])
def test_many_tensors_beside_one_are_refused_and_the_next_call_is_right(backend: str) -> None:
    for _ in range(5):  # each a race of rank 0's first part with the other ranks' receives of data
        with convoy_of(WORLD, backend) as convoy:
            outcomes = convoy.run(allreduces(convoy, [[model(0), np.ones(3), np.ones(3)]]), convoy.memberships)
            assert {type(outcome.error) for outcome in outcomes.values()} == {MismatchError}
            few = [np.ones(3) for _ in range(WORLD)]
            outcomes = convoy.run(allreduces(convoy, [few]), convoy.memberships)
            assert [outcome.error for outcome in outcomes.values()] == [None] * WORLD
            assert all((array == WORLD).all() for array in few)


# ---------------------------------------------------------------------------------------------- too long ones


def too_long(value: float) -> dict[str, Any]:
    """A dict that can't be described; what is too long compresses well."""
    return {"x" * MOST_NBYTES: np.full(3, value)}


def refused(errors: Iterable[RaycollectError | None]) -> Violation:
    """The only violation, which all ranks know."""
    violations: set[Violation] = set()
    for error in errors:
        assert type(error) is UnsupportedError
        violations |= {*error.violations}
    (violation,) = violations
    assert (violation.kind, violation.field) == ("unsupported", "operand")
    return violation


@pytest.mark.parametrize(
    ("groups", "backend"),
    [(2, "shm"), (2, "tcp"), ([[0, 1], [1, 2]], "local")],
    ids=["shm", "tcp", "by the controller"],
)
def test_too_long_a_description_is_refused_on_all_ranks(groups: Any, backend: str) -> None:
    few = [np.ones(3), np.ones(3)]
    with convoy_of(groups, backend) as convoy:
        first, last = convoy.memberships[0], convoy.memberships[-1]
        requests = [*allreduces(convoy, [[few[0], too_long(1)]]), *allreduces(convoy, [few], group=-1)]
        outcomes = convoy.run(requests, [first, last])
        violation = refused(outcome.error for outcome in outcomes.values())
        _, key, _ = requests[0].operands[1]
        assert (violation.rank, violation.call, violation.ref) == (1, 0, key.hex() if key else "")
        assert all((array == 1).all() for array in few), "nothing was written"
        outcomes = convoy.run(allreduces(convoy, [few], group=-1), [last])
        assert [outcome.error for outcome in outcomes.values()] == [None, None]
        assert all((array == 2).all() for array in few)


def test_a_batch_whose_descriptions_are_too_long_together_is_refused() -> None:
    names = random.Random(1).randbytes(MOST_NBYTES // 4).hex()  # which takes half as much when compressed
    halves = [{names[at:]: np.ones(3)} for at in range(5)]
    few = np.ones(3)
    with convoy_of([[0, 1]]) as convoy:
        requests = allreduces(convoy, [[few, half] for half in halves])
        outcomes = convoy.run(requests, convoy.memberships * len(requests))
        assert refused(outcome.error for outcome in outcomes.values()).rank == 1
        assert all((array == 1).all() for half in halves for array in (few, *half.values()))


def test_too_long_a_description_in_a_members_call_is_refused_on_all_ranks() -> None:
    few = np.ones(3)
    fleet = Fleet(2)
    violation = refused(outcome.error for outcome in fleet.call(OpKind.ALLREDUCE, [few, too_long(1)]))
    assert violation.rank == 1
    assert (few == 1).all()
    fleet.works_on()
    fleet.close()


# ---------------------------------------------------------------------------------------------- the exchange


class Others:
    """The exchange as one rank sees it; the other ranks send these messages, round by round."""

    def __init__(self, rounds: Sequence[bytes]) -> None:
        self.sent: list[bytes] = []
        self._rounds = list(rounds)

    def __call__(self, message: bytes, _: object = None) -> list[bytes]:
        self.sent.append(message)
        return [message, self._rounds.pop(0)]


LONG = bytes(range(256)) * 1000


def test_short_arrivals_take_one_exchange() -> None:
    others = Others([b"theirs"])
    assert exchange(others, b"mine", ranks=2) == [b"mine", b"theirs"]
    assert messages_of([b"mine", b"theirs"]) == (b"mine", b"theirs")


def test_a_rank_with_a_short_arrival_gets_the_parts_of_a_long_one() -> None:
    first: list[bytes] = []
    exchange(lambda message, _: (first.append(message), [message])[1] if not first else [message], LONG, ranks=1)
    parts = [LONG[at : at + ARRIVAL_NBYTES] for at in range(0, len(LONG), ARRIVAL_NBYTES)]
    others = Others([*first, *parts])
    assert exchange(others, b"mine", ranks=2) == [b"mine", LONG]
    assert all(others.sent), "an empty message is a commit"


def test_parts_that_do_not_fit_their_digest_are_refused() -> None:
    _, message = messages_of([b"mine", LONG])
    shifted = [LONG[at : at + ARRIVAL_NBYTES] for at in range(7, len(LONG) + 7, ARRIVAL_NBYTES)]
    for parts in ([b"no part"] * 10, shifted):
        with pytest.raises(ProtocolError):
            exchange(Others([message, *parts]), b"mine", ranks=2)
    with pytest.raises(ProtocolError):
        exchange(Others([message[:-1]]), b"mine", ranks=2)


def test_the_parts_of_many_ranks_fit_one_frame() -> None:
    for ranks in (2, 18, 500):
        others = [bytes(1 + rank % 3) for rank in range(1, ranks)]
        sent: list[bytes] = []

        def bring(message: bytes, _: object, sent: list[bytes] = sent, others: list[bytes] = others) -> list[bytes]:
            sent.append(message)
            return [message, *others]

        assert exchange(bring, LONG, ranks=ranks) == [LONG, *others]
        assert b"".join(sent[1:]) == LONG
        assert ranks * max(map(len, sent)) < MAX_FRAME_NBYTES


def test_messages_of_a_later_run_differ_with_any_arrival() -> None:
    later = messages_of([LONG, b"other"])
    assert later == messages_of([LONG, b"other"])
    assert sum(map(len, later)) < 500
    for changed in ([LONG[1:], b"other"], [LONG, b"others"]):
        assert all(one != other for one, other in zip(later, messages_of(changed), strict=True))
    assert whole(Others([]), b"mine", [b"mine", b"theirs"]) == [b"mine", b"theirs"]
