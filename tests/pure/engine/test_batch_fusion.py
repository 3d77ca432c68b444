"""Kernels of a batch that become one, the memory that they take, and what a loop remembers of them."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from raycollect.backends import arrays
from raycollect.core.model import Key, OpKind
from raycollect.engine.agreement import decode_arrivals, encode_arrivals
from raycollect.errors import KernelError, MismatchError, ProtocolError, TensorFreedError
from raycollect.planner import Membership, Request, plan, plan_part
from raycollect.planner.algorithms import ALGORITHMS, build
from raycollect.planner.ir import Part
from raycollect.planner.schedule import schedule
from raycollect.planner.template import NATIVE
from tests.pure.engine.convoys import allreduces, convoy_of
from tests.pure.fleet import WAIT_S, Convoy, FailAt, launched
from tests.pure.meaning import gives_of, meaning
from tests.support.values import replace


def _with_choice(request: Request, membership: Membership, name: str, at_least: int) -> Part:
    """The part of a request with one algorithm beside the native one."""
    native = replace(plan_part(request), choices=(NATIVE,))
    other = build(native, membership, ALGORITHMS[name])
    templates = tuple(replace(native.template(rank), others=(other.template(rank).steps,)) for rank in native.ranks)
    choices = (NATIVE, replace(other.choices[0], at_least=at_least))
    parts = tuple(range(len(templates)))
    return replace(native, templates=templates, parts=parts, choices=choices)


@pytest.mark.parametrize(("size", "kinds"), [(3, {OpKind.BROADCAST}), (4, {OpKind.SEND, OpKind.RECV})])
def test_an_algorithm_is_taken_by_the_bytes_of_a_bundle(size: int, kinds: set[OpKind]) -> None:
    """Two calls of 4 x 8 bytes reach the 64 from which on a tree is taken."""
    with convoy_of(4, "tcp") as convoy:
        (membership,) = convoy.memberships
        values = [[np.full(size, 10 * call + rank) for rank in range(4)] for call in range(2)]
        requests = [
            Request(
                kind=OpKind.BROADCAST,
                group=membership.spec,
                operands=tuple(
                    (rank, *((key, None) if rank == 0 else (None, key)))
                    for rank, key in enumerate(convoy.keep(rank, value) for rank, value in enumerate(of_call))
                ),
                root=0,
                timeout_s=WAIT_S,
            )
            for of_call in values
        ]
        part = _with_choice(requests[0], membership, "tree", 64)
        planned = schedule(requests, [part] * 2, [membership] * 2, 32 << 20)
        kernels = _heard(convoy, 1)
        outcomes = {one: future.result(WAIT_S) for one, future in convoy.start(planned).items()}
        for call, of_call in enumerate(values):
            for rank in range(4):
                assert outcomes[rank].error is None, outcomes[rank].error
                np.testing.assert_array_equal(of_call[rank], np.full(size, 10 * call))
        assert {kernel.kind for kernel in kernels} <= kinds
        assert kernels


@pytest.mark.parametrize("kind", [OpKind.BROADCAST, OpKind.ALLGATHER, OpKind.ALLTOALL, OpKind.GATHER, OpKind.SCATTER])
@pytest.mark.parametrize("world", [2, 3, 4])
def test_what_stands_in_runs_in_launches_of_pairs(kind: OpKind, world: int) -> None:
    """Over `tcp`, where pairs of one launch don't see each other; each call is repeated on other tensors."""
    with convoy_of(world, "tcp") as convoy:
        spec = replace(convoy.memberships[0].spec, ops=("send", "recv"))
        membership = replace(convoy.memberships[0], spec=spec)
        root = 0 if kind in (OpKind.BROADCAST, OpKind.GATHER, OpKind.SCATTER) else -1
        requests, meant, takes = [], [], []
        for call in range(3):
            gives = gives_of(kind, world, lambda n, call=call: np.arange(n) + call, lambda a, b: 2 + a + 3 * b, root)
            meant.append(meaning(kind, gives, root=root))
            lands = {rank: np.zeros_like(gives[0]) for rank in range(1, world)} if kind is OpKind.BROADCAST else {}
            takes.append(lands)
            operands = tuple(
                (
                    rank,
                    None if gives[rank] is None else convoy.keep(rank, gives[rank]),
                    convoy.keep(rank, lands[rank]) if rank in lands else None,
                )
                for rank in range(world)
            )
            requests.append(Request(kind=kind, group=spec, operands=operands, root=root, timeout_s=WAIT_S))
        planned = plan(requests, [membership] * 3)
        assert planned.width > 1 or world == 2
        outcomes = {one: future.result(WAIT_S) for one, future in convoy.start(planned).items()}
        for rank in range(world):
            assert outcomes[rank].error is None, outcomes[rank].error
            made = [container.value for container in outcomes[rank].outputs]
            got = [of[rank] for of in takes if rank in of] or made
            wanted = [of[rank] for of in meant] if got else []
            for one, right in zip(got, wanted, strict=True):
                for piece, whole in zip(*((x if isinstance(x, list) else [x]) for x in (one, right)), strict=True):
                    np.testing.assert_array_equal(piece, whole)


def _heard(convoy: Convoy, one: int) -> list[Any]:
    """What kernels a participant launches, from now on."""
    kernels: list[Any] = []
    for name, communicator in convoy.communicators[one].items():
        convoy.communicators[one][name] = launched(communicator, kernels.append)
    return kernels


@pytest.mark.parametrize("count", [2, 7, 50])
def test_independent_calls_of_one_form_are_one_kernel(count: int) -> None:
    with convoy_of([[0, 1]]) as convoy:
        values = [[np.full(5, 1.0 + call), np.full(5, 2.0 * call)] for call in range(count)]
        expected = [sum(of_call) for of_call in values]
        kernels = _heard(convoy, 0)
        outcomes = convoy.run(allreduces(convoy, values), convoy.memberships * count)
        assert all(outcome.error is None for outcome in outcomes.values())
        assert [kernel.src.size for kernel in kernels] == [5 * count]
        for of_call, right in zip(values, expected, strict=True):
            np.testing.assert_array_equal(of_call, [right] * 2)


@pytest.mark.parametrize("backend", ["shm", "tcp"])
@pytest.mark.parametrize(("count", "size"), [(100, 1000), (1, 13000)])
def test_calls_that_turn_out_to_overlap_run_one_after_the_other(count: int, size: int, backend: str) -> None:
    sizes = [size] * count + [3, 3]
    with convoy_of(2, backend) as convoy:
        models = [{str(at): np.full(size, 1 + rank) for at, size in enumerate(sizes)} for rank in range(2)]
        views = [{name: array[:] for name, array in model.items()} for model in models]
        outcomes = convoy.run(allreduces(convoy, [models, views]), convoy.memberships * 2)
        assert [outcome.error for outcome in outcomes.values()] == [None] * 2
        assert all((array == 6).all() for model in models for array in model.values())


def test_a_batch_in_a_loop_is_remembered_until_an_operand_is_gone_or_changed() -> None:
    with convoy_of([[0, 1]]) as convoy:
        values = [[np.ones(3), np.ones(3)] for _ in range(3)]
        requests = allreduces(convoy, values)
        kernels = _heard(convoy, 0)
        planned = plan(requests, convoy.memberships * 3)
        for turn in range(3):
            assert all(f.result(WAIT_S).error is None for f in convoy.start(planned).values())
            np.testing.assert_array_equal(values, np.full((3, 2, 3), 2.0 ** (turn + 1)))
        assert len({id(kernel) for kernel in kernels}) == 1, "the same kernel each time"
        values[1][0].shape = (3, 1)
        for future in convoy.start(planned).values():
            assert isinstance(future.result(WAIT_S).error, MismatchError)
        values[1][0].shape = (3,)
        assert all(f.result(WAIT_S).error is None for f in convoy.start(planned).values())
        key: Key = requests[2].operands[0][1]  # type: ignore[assignment]
        convoy.stores[0].free([key])
        for future in convoy.start(planned).values():
            assert isinstance(future.result(WAIT_S).error, TensorFreedError)


def test_staging_that_a_failure_left_behind_is_not_used_again() -> None:
    with convoy_of([[0, 1]]) as convoy:
        sizes: list[int] = []

        def allocate(info: Any) -> Any:
            sizes.append(info.nbytes)
            return arrays.empty(info)

        convoy.allocate = allocate
        values = [[np.ones(3), np.ones(3)] for _ in range(4)]
        requests = allreduces(convoy, values)
        for _ in range(3):
            assert all(one.error is None for one in convoy.run(requests, convoy.memberships * 4).values())
            assert len(sizes) == 2, "one each, and remembered"
        convoy.faults = FailAt(point="before_check", rank=0)
        assert isinstance(convoy.run(requests, convoy.memberships * 4)[0].error, KernelError)
        convoy.faults = FailAt(point="start", rank=9)
        assert all(one.error is None for one in convoy.run(requests, convoy.memberships * 4).values())
        assert len(sizes) == 2, "no kernel has worked in it"
        convoy.faults = FailAt(point="after_kernel", rank=0)
        assert isinstance(convoy.run(requests, convoy.memberships * 4)[0].error, KernelError)
        convoy.faults = FailAt(point="start", rank=9)
        fresh = [[np.ones(3), np.ones(3)] for _ in range(4)]
        assert all(one.error is None for one in convoy.run(allreduces(convoy, fresh), convoy.memberships * 4).values())
        assert len(sizes) > 2


def test_who_ended_is_told_by_places_only_where_all_ran_in_the_checks_launch() -> None:
    with convoy_of([[0, 1], [1, 2]]) as convoy:
        for communicators in convoy.communicators:
            for name, inner in list(communicators.items()):
                communicators[name] = _Ending(inner)  # type: ignore[assignment]
        one = convoy.run(allreduces(convoy, [[np.ones(1), np.ones(1)]] * 2, 1), [convoy.memberships[1]] * 2)
        assert {at: outcome.ended for at, outcome in one.items()} == {1: (0, 1), 2: (0, 1)}
        both = allreduces(convoy, [[np.ones(1), np.ones(1)]], 0) + allreduces(convoy, [[np.ones(1), np.ones(1)]], 1)
        for outcome in convoy.run(both, convoy.memberships).values():
            assert outcome.ended == ()


class _Ending:
    """A communicator that knows of all ranks that they have ended."""

    def __init__(self, inner: Any) -> None:
        self._inner = inner

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def end(self, launch: Any, ok: bool, owed: Any = ()) -> tuple[int, ...]:
        self._inner.end(launch, ok, owed)
        return launch.ranks if ok else ()


@given(
    arrivals=st.dictionaries(st.integers(0, 300), st.sampled_from([b"", b"a", b"b" * 5000, bytes(70)])),
    conflict=st.booleans(),
)
def test_arrivals_of_a_batch_are_read_as_they_were_written(arrivals: dict[int, bytes], conflict: bool) -> None:
    assert decode_arrivals(encode_arrivals(arrivals, conflict=conflict)) == (conflict, arrivals)


@pytest.mark.parametrize("data", [b"", b"\x90", b"\xc1abc", encode_arrivals({1: b"x"}, conflict=True)[:-1]])
def test_what_are_no_arrivals_is_a_protocol_error(data: bytes) -> None:
    with pytest.raises(ProtocolError):
        decode_arrivals(data)
