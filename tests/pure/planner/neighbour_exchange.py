"""New operations, as `test_new_operation` adds them to a copy of the package; `main` runs in that copy."""

from __future__ import annotations

import itertools
import sys
import tempfile
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

import raycollect
from raycollect import backends
from raycollect.core.model import Kernel, Launch, OpKind, ReduceOp, TensorInfo
from raycollect.core.protocols import Communicator
from raycollect.errors import MismatchError, MissingMemberError, RefusedError
from raycollect.planner import Cluster, Request, decode_program, encode_program, plan, predict
from raycollect.planner.explain import explain
from tests.pure.communicators import ThreadTeam
from tests.pure.conformance import run_launch
from tests.pure.fleet import Fleet
from tests.pure.operands import left_fold, operand
from tests.pure.processes import Crew
from tests.support.values import replace

WORLD = 3
BACKENDS = ("shm", "tcp")


def requests(*, given: bool) -> Request:
    """A call of all ranks; `given`: with a tensor for the result."""
    fleet = Fleet(WORLD)
    spec = replace(fleet.spec, ops=backends.ops_of("shm"), memory="cpu")
    fleet.close()
    operands = tuple((rank, ("give", rank), ("take", rank) if given else None) for rank in range(WORLD))
    return Request(kind=OpKind("neighbour_exchange"), group=spec, operands=operands)


def plans() -> None:
    """It is planned, verified, explained and priced, and refused where an operand is missing."""
    for given in (True, False):
        planned = plan([requests(given=given)])
        for position in range(WORLD):
            program = planned.program(position)
            assert decode_program(encode_program(program)) == program
        told = explain(planned, {one: (TensorInfo(shape=(5,), dtype="float32", itemsize=4),) for one in planned.uses()})
        assert told.rows[0].op == "neighbour_exchange"
        assert (told.memory.outputs, told.memory.scratch) == (0 if given else 20, 20 * WORLD)
    bare = requests(given=True)
    try:
        plan([replace(bare, operands=(*bare.operands[:-1], (WORLD - 1, None, None)))])
    except MissingMemberError:
        pass
    else:
        raise AssertionError("a rank that gives nothing is not refused")
    cluster = Cluster(hosts=4, ranks_per_host=2, backend=backends.get("tcp"))
    (found,) = predict("neighbour_exchange", 1 << 20, cluster)
    assert found.nbytes_between == 4 << 20


def runs() -> None:
    """Ranks agree on it, and run it; a rank with another shape is refused on all."""
    fleet = Fleet(WORLD)
    fleet.spec = replace(fleet.spec, ops=backends.ops_of("shm"))
    kind = OpKind("neighbour_exchange")
    given = [np.full(4, rank + 1.0) for rank in range(WORLD)]
    taken = [np.zeros(4) for _ in range(WORLD)]
    fleet.must(kind, fleet.keep_all(given), fleet.keep_all(taken))
    assert [one[0] for one in taken] == [3.0, 1.0, 2.0]
    outcomes = fleet.must(kind, fleet.keep_all(given))
    assert [one.outputs[0].tensors[0][0] for one in outcomes] == [3.0, 1.0, 2.0]
    odd = [np.full(4 + (rank == 1), 1.0) for rank in range(WORLD)]
    found = fleet.run(kind, fleet.keep_all(odd), fleet.keep_all(taken))
    assert all(isinstance(one.error, MismatchError) for one in found)
    fleet.close()


def body(name: str, rank: int) -> float:
    """What a member calls."""
    given, taken = np.full(4, rank + 1.0), np.zeros(4)
    raycollect.neighbour_exchange(taken, given, name)
    try:
        raycollect.neighbour_exchange(taken, np.ones(3 + rank), name)
    except RefusedError:
        return float(taken[3])
    return -1.0


def members() -> None:
    """Members call it in processes of their own."""
    crew = Crew()
    with tempfile.TemporaryDirectory() as folder:
        crew.rendezvous = f"file://{folder}"
        for backend in BACKENDS:
            found: list[Any] = crew.group(WORLD, backend).must(body)
            assert found == [3.0, 1.0, 2.0], (backend, found)
            crew.rest()
    crew.close()


def body_fold(communicator: Communicator, launch: Launch, given: list[Any], *, in_place: bool) -> Any:
    """Folds what this rank and those behind it give, from the last rank on."""
    src = given[communicator.rank].copy()
    dst = src if in_place else np.zeros_like(src)
    run_launch(communicator, launch, Kernel(kind=OpKind("suffix_scan"), src=src, dst=dst, op=ReduceOp.SUM))
    return dst


def folds() -> None:
    """A fold of the ranks that the table names, in its order, in several chunks."""
    for backend, size in itertools.product(BACKENDS, (7, 700_001)):
        team = ThreadTeam(backend, WORLD)
        given = [operand(rank, "float32", size) for rank in range(WORLD)]
        for in_place in (False, True):
            results = team.must(partial(body_fold, given=given, in_place=in_place), team.launch())
            for rank, result in enumerate(results):
                expected = left_fold(ReduceOp.SUM, given[: rank - 1 if rank else None : -1])
                np.testing.assert_array_equal(result, expected, f"{backend}, {size} elements, rank {rank}")
        team.close()


def main(copy: str) -> None:
    """All of it, in the copy of the package in this folder."""
    assert Path(raycollect.__file__).is_relative_to(copy)
    plans()
    runs()
    folds()
    members()
    assert callable(raycollect.neighbour_exchange_refs)


if __name__ == "__main__":
    main(sys.argv[1])
