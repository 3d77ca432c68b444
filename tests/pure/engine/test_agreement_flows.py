"""The check of every operation: which parts must be alike, what may be uneven, and which rank and piece is named."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from typing import Any

import msgpack
import pytest
from hypothesis import given
from hypothesis import strategies as st

from raycollect.core.model import TENSOR, OpKind, Structure, TensorInfo
from raycollect.core.operations import PIECES, PIECEWISE
from raycollect.engine.agreement import Arrival, Side, Spec, decide, encode_arrival, judge
from raycollect.errors import ProtocolError, Violation
from tests.pure.meaning import KINDS, REDUCTIONS, ROOTED, gives_of, takers
from tests.support.values import replace

WITH_TENSORS = tuple(kind for kind in KINDS if kind is not OpKind.BARRIER)
FORMS = (
    TENSOR,
    Structure("list", (), (TENSOR, TENSOR)),
    Structure("dict", ("a", 1), (TENSOR, Structure("tuple", (), (TENSOR,)))),
)


def _info(size: int, dtype: str = "float32") -> TensorInfo:
    return TensorInfo(shape=(size,), dtype=dtype, itemsize=4)


def _side(value: Any, form: Structure = TENSOR, *, loose: bool = False) -> Side:
    """A side of one tensor, or of a list of pieces; each made of as many tensors as `form` has."""
    parts = value if isinstance(value, list) else [value]
    structure = Structure("list", (), (form,) * len(parts)) if isinstance(value, list) else form
    return Side(structure=structure, tensors=tuple(t for t in parts for _ in range(form.count)), loose=loose)


def _taken(kind: OpKind, gives: Sequence[Any], rank: int, root: int) -> Any:
    """What a rank takes: as `meaning`, of infos."""
    return {
        OpKind.BROADCAST: lambda: gives[root],
        OpKind.SEND: lambda: gives[root],
        OpKind.ALLGATHER: lambda: list(gives),
        OpKind.GATHER: lambda: list(gives),
        OpKind.SCATTER: lambda: gives[root][rank],
        OpKind.REDUCESCATTER: lambda: gives[0][rank],
        OpKind.ALLTOALL: lambda: [give[rank] for give in gives],
    }[kind]()


def _specs(
    kind: OpKind,
    world: int = 3,
    root: int = 0,
    *,
    size: Callable[[int, int], int] = lambda giver, taker: 3 * giver + taker + 1,
    form: Structure = TENSOR,
    given: bool = True,
) -> list[Spec]:
    """A collective that fits together; a SEND goes from rank 0 to rank 1."""
    world = 2 if kind is OpKind.SEND else world
    root = root if kind in ROOTED or kind is OpKind.SEND else -1
    gives = gives_of(kind, world, _info, size, root)
    takes = takers(kind, world, root, 1 - root)
    return [
        Spec(
            op=kind.value,
            reduce_op="SUM" if kind in REDUCTIONS else "",
            root=root,
            gives=None if give is None else _side(give, form),
            takes=_side(_taken(kind, gives, rank, root), form) if rank in takes and given else None,
        )
        for rank, give in enumerate(gives)
    ]


def _decide(specs: Sequence[Spec]) -> tuple[Violation, ...]:
    return decide(range(len(specs)), [Arrival(spec=spec) for spec in specs])


def _named(specs: Sequence[Spec]) -> list[tuple[int, str, str, str]]:
    return [(v.rank, v.field, v.found, v.expected) for v in _decide(specs)]


# ---------------------------------------------------------------------------------------------- what fits


@pytest.mark.parametrize("given", [True, False], ids=["given", "made"])
@pytest.mark.parametrize("form", FORMS, ids=str)
@pytest.mark.parametrize("kind", KINDS)
def test_a_collective_that_fits_has_no_violation_however_uneven_its_pieces(
    kind: OpKind, form: Structure, given: bool
) -> None:
    for world in (1, 2, 3, 5):
        for root in range(world if kind is not OpKind.SEND else 2):
            assert _decide(_specs(kind, world, root, form=form, given=given)) == ()


@pytest.mark.parametrize("given", [True, False], ids=["given", "made"])
@pytest.mark.parametrize(
    ("kind", "most"),
    [
        (OpKind.ALLGATHER, 7),
        (OpKind.GATHER, 7),
        (OpKind.SCATTER, 3),
        (OpKind.REDUCESCATTER, 3),
        (OpKind.ALLTOALL, 9),
    ],
)
def test_all_ranks_learn_the_size_of_the_largest_piece(kind: OpKind, most: int, given: bool) -> None:
    for form in FORMS:
        blobs = tuple(encode_arrival(Arrival(spec=spec)) for spec in _specs(kind, form=form, given=given))
        assert judge((0, 1, 2), blobs).most == (most,) * form.count


def test_another_root_is_named_before_any_tensor_is_compared() -> None:
    for kind in ROOTED:
        specs = [*_specs(kind)[:2], _specs(kind, root=1)[2]]
        specs[1] = replace(specs[1], gives=_side(_info(99)))
        assert _named(specs) == [(2, "root", "1", "0")]


# ---------------------------------------------------------------------------------------------- the matrix


def test_a_rank_that_is_unable_does_not_make_the_others_wrong() -> None:
    own = Violation(kind="freed", rank=1, field="operand", found="freed")
    for kind in WITH_TENSORS:
        arrivals = [Arrival(spec=spec) for spec in _specs(kind)]
        arrivals[1] = Arrival(spec=replace(arrivals[1].spec, gives=None, takes=None), violations=(own,))
        assert decide(range(len(arrivals)), arrivals) == (own,)


def test_a_rank_that_is_half_able_is_compared_by_the_other_half() -> None:
    own = Violation(kind="read_only", rank=1, field="operand", found="read-only")
    arrivals = [Arrival(spec=spec) for spec in _specs(OpKind.ALLTOALL)]
    gives = _side([_info(4), _info(50), _info(6)])
    arrivals[1] = Arrival(spec=replace(arrivals[1].spec, gives=gives, takes=None), violations=(own,))
    arrivals[2] = Arrival(spec=replace(arrivals[2].spec, takes=_side([_info(3), _info(6), _info(90)])))
    violations = decide(range(3), arrivals)
    assert violations[0] == own
    assert [(v.rank, v.field) for v in violations[1:]] == [(2, "shape of output 2")]


# ---------------------------------------------------------------------------------------------- loose pieces


def _square(rows: int, columns: int) -> TensorInfo:
    return replace(_info(0), shape=(rows, columns))


def test_loose_pieces_fit_where_they_have_as_many_elements() -> None:
    specs = _specs(OpKind.ALLGATHER, size=lambda giver, taker: 6)
    specs[0] = replace(specs[0], takes=_side([_square(2, 3)] * 3, loose=True))
    assert _decide(specs) == ()
    specs[0] = replace(specs[0], takes=_side([_square(2, 3)] * 3))
    assert {(v.rank, v.field) for v in _decide(specs)} == {(0, f"shape of output {giver}") for giver in range(3)}


def test_loose_pieces_do_not_excuse_the_others() -> None:
    """Where no end of a flow is loose, shapes count."""
    specs = _specs(OpKind.ALLTOALL, size=lambda giver, taker: 6)
    specs[0] = replace(specs[0], gives=_side([_info(6)] * 3, loose=True))
    specs[1] = replace(specs[1], takes=_side([_square(2, 3)] * 3))
    assert {(v.rank, v.field) for v in _decide(specs)} == {(1, "shape of output 1"), (1, "shape of output 2")}


# ---------------------------------------------------------------------------------------------- any change


@st.composite
def _collectives(draw: st.DrawFn) -> tuple[OpKind, list[Spec], Structure]:
    kind = draw(st.sampled_from(WITH_TENSORS))
    world, form = draw(st.integers(2, 5)), draw(st.sampled_from(FORMS))
    seed, root = draw(st.integers(0, 99)), draw(st.integers(0, 1 if kind is OpKind.SEND else world - 1))
    sizes = {(a, b): random.Random(f"{seed} {a} {b}").randint(0, 9) for a in range(world) for b in range(world)}
    specs = _specs(
        kind, world, root, size=lambda giver, taker: sizes[giver, taker], form=form, given=draw(st.booleans())
    )
    return kind, specs, form


CHANGES: dict[str, Callable[[TensorInfo], TensorInfo]] = {
    "dtype": lambda info: replace(info, dtype="int32"),
    "shape": lambda info: replace(info, shape=(info.shape[0] + 1,)),
    "device": lambda info: replace(info, device="cuda:0"),
}
_Part = tuple[int, str]
"""(rank, how its part is called)."""


def _flow(kind: OpKind, specs: Sequence[Spec], rank: int, side: str, piece: int) -> set[_Part]:
    """All parts that must be like this one."""
    in_pieces, out_pieces = PIECES[kind]
    givers = {r for r, spec in enumerate(specs) if spec.gives}
    takers = {r for r, spec in enumerate(specs) if spec.takes}
    if not in_pieces and not out_pieces:
        return {(r, "") for r in givers | takers}
    giver, taker = (rank, piece) if side == "gives" else (piece, rank)
    if in_pieces and out_pieces:
        parts = {(giver, f" of input {taker}")} if giver in givers else set()
        return parts | ({(taker, f" of output {giver}")} if taker in takers else set())
    if out_pieces:
        return {(giver, "")} | {(r, f" of output {giver}") for r in takers}
    taker = piece if side == "gives" else rank
    return {(r, f" of input {taker}") for r in givers} | ({(taker, " of output")} if taker in takers else set())


@given(made=_collectives(), change=st.sampled_from(["dtype", "shape", "device", "structure"]), data=st.data())
def test_any_single_change_names_that_piece_or_its_other_end(
    made: tuple[OpKind, list[Spec], Structure], change: str, data: st.DataObject
) -> None:
    kind, specs, form = made
    there = [(rank, side) for rank, spec in enumerate(specs) for side in ("gives", "takes") if getattr(spec, side)]
    rank, side = data.draw(st.sampled_from(there))
    value: Side = getattr(specs[rank], side)
    in_pieces = PIECES[kind][side == "takes"]
    piece = data.draw(st.integers(0, len(specs) - 1)) if in_pieces else 0
    flow = _flow(kind, specs, rank, side, piece)
    if change == "structure":
        other = Structure("tuple", (), (form,)) if form is TENSOR else Structure("tuple", (), form.items)
        items = (*value.structure.items[:piece], other, *value.structure.items[piece + 1 :])
        changed = replace(value, structure=replace(value.structure, items=items) if in_pieces else other)
    else:
        at = piece * form.count + data.draw(st.integers(0, form.count - 1))
        infos = (*value.tensors[:at], CHANGES[change](value.tensors[at]), *value.tensors[at + 1 :])
        changed = replace(value, tensors=infos)
    specs[rank] = replace(specs[rank], **{side: changed})
    if change == "device":
        assert _decide(specs) == ()
        specs = [replace(spec, one_device=True) for spec in specs]
    mine = {part for part in flow if part[0] == rank and ("output" in part[1]) <= (side == "takes")}
    found = {(v.rank, v.field.removeprefix(change)) for v in _decide(specs)}
    if change in ("dtype", "device"):  # of all that one kernel moves
        flow = {part for r, s in there for at in range(len(specs)) for part in _flow(kind, specs, r, s, at)}
    if len(flow) > 2:
        assert found
        assert found <= mine, "the odd one alone"
    else:
        assert bool(found) == (len(flow) == 2), "nobody else has a say in it"
        assert found <= flow


# ---------------------------------------------------------------------------------------------- bytes


@pytest.mark.parametrize("kind", sorted(PIECEWISE, key=lambda kind: kind.value))
def test_a_side_without_a_piece_for_each_rank_is_a_protocol_error(kind: OpKind) -> None:
    specs = _specs(kind, 3)
    for side in ("gives", "takes"):
        value = getattr(specs[0], side)
        if value is None or value.structure is TENSOR:
            continue
        short = replace(specs[0], **{side: _side([_info(1), _info(1)])})
        blobs = [encode_arrival(Arrival(spec=spec)) for spec in (short, *specs[1:])]
        with pytest.raises(ProtocolError, match="can't be compared"):
            judge((0, 1, 2), tuple(blobs))


def test_a_side_whose_tensors_are_not_those_of_its_structure_is_a_protocol_error() -> None:
    values = msgpack.unpackb(encode_arrival(Arrival(spec=_specs(OpKind.ALLREDUCE)[0])))
    tensors, loose, structure = values[1][3]
    for wrong in ([tensors * 2, loose, structure], [[], loose, structure], [tensors, loose, ["list", [], []]]):
        values[1][3] = wrong
        with pytest.raises(ProtocolError):
            judge((0,), (msgpack.packb(values),))
    with pytest.raises(ValueError, match="2 tensors for a tensor"):
        Side(structure=TENSOR, tensors=(_info(1), _info(1)))
