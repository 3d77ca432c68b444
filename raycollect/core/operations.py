"""The operations, one value each: the planner, the engine, the driver and the members read the same table.

What an operation does follows from its fields. Each rank that gives has one value, or one piece per rank
(`gives_pieces`). A rank that takes gets the values of its `givers`, or of their pieces the one for it: folded into one
(`folds`), as one piece per giver (`takes_pieces`), or the only one as it is. As kernels (`raycollect.core.model`):

=============  ======================  ======================  ==========================================
kind           src                     dst                     afterwards
=============  ======================  ======================  ==========================================
ALLREDUCE      array                   array                   dst: the fold of all src, in rank order
REDUCE         array                   root: array             root's dst: the fold of all src
BROADCAST      root: array             others: array           dst: the root's src (see `Kernel`)
ALLGATHER      array                   pieces                  dst[r]: src of rank r
GATHER         array                   root: pieces            root's dst[r]: src of rank r
SCATTER        root: pieces            array                   dst: the root's src[own rank]
REDUCESCATTER  pieces                  array                   dst: the fold of all ranks' src[own rank]
ALLTOALL       pieces                  pieces                  dst[r]: src[own rank] of rank r
SCAN           array                   array                   dst: the fold of src of ranks 0 to own rank
EXSCAN         array                   array                   the same without own rank; rank 0's dst: its src
SEND, RECV     SEND: array             RECV: array             dst: src of the sender
BARRIER
=============  ======================  ======================  ==========================================

Prices are lines in n, the bytes that one rank gives, all pieces together; `raycollect.planner.cost` has the theory.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal


class OpKind(enum.Enum):
    """The collective operations."""

    ALLREDUCE = "allreduce"
    REDUCE = "reduce"
    BROADCAST = "broadcast"
    ALLGATHER = "allgather"
    REDUCESCATTER = "reducescatter"
    GATHER = "gather"
    SCATTER = "scatter"
    ALLTOALL = "alltoall"
    SCAN = "scan"
    EXSCAN = "exscan"
    SEND = "send"
    RECV = "recv"
    BARRIER = "barrier"

    if TYPE_CHECKING:

        def __hash__(self) -> int: ...
    else:
        __hash__ = object.__hash__  # members are unique; that of `Enum` is a call


OPS = tuple(kind.value for kind in OpKind)
"""The names of all operations."""

Ranks = Literal["all", "root", "others", "peer", ""]
"""Which ranks of an operation: all, its root, all but the root, the destination of a send, or none."""

LinePrice = Callable[[Any], Any]
"""From the `HostLayout` of the ranks, two or more, to a `Cost`; both are of `raycollect.planner.cost`."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Price:
    """What a kernel costs where it does better than to move all data directly, by how a backend moves data (`Pricing`).

    Attributes:
        memory: Ranks copy from each other's memory; None: each what it takes.
        mesh: Data goes over the links between ranks; None: directly from each giver to each taker.
        ring: By the rings and trees of a library; None: as on a mesh.
        by_host: On a mesh between hosts of which one has several ranks, data enters each host once; None: it does not.
    """

    memory: LinePrice | None = None
    mesh: LinePrice | None = None
    ring: LinePrice | None = None
    by_host: LinePrice | None = None


def _everyone(position: int, count: int) -> Sequence[int]:
    return range(count)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class OperationSpec:
    """One operation.

    Attributes:
        kind: Which one.
        gives: The ranks that give.
        takes: The ranks that take.
        gives_pieces: Whether a rank gives one piece per rank.
        takes_pieces: Whether a rank takes one piece per rank.
        folds: Whether the values are folded by a reduce op.
        in_place: Whether the result replaces what the rank gives, unless a new tensor is asked for.
        makes: Whether an output of its own is made where none is given.
        sources: The positions of the ranks whose values a rank takes, in order, by its position and the number of
            ranks. All, where there are pieces; without meaning, where the root alone gives.
        root: The parameter of the root; empty where there is none.
        refs: The driver's parameters of the inputs and of the outputs; empty where there are none.
        kernels: Which backends have a kernel of it. ``"usual"``: all that do not say which they have; ``"own"``: those
            of this package; empty: those alone that name it.
        substitutes: The operations that it is made of where a backend lacks it, the best first. Those of a folding
            operation fold; others only move.
        price: What its kernel costs, where that does not follow from who gives what to whom.
    """

    kind: OpKind
    gives: Ranks = "all"
    takes: Ranks = "all"
    gives_pieces: bool = False
    takes_pieces: bool = False
    folds: bool = False
    in_place: bool = False
    makes: bool = True
    sources: Callable[[int, int], Sequence[int]] = _everyone
    root: str = ""
    refs: tuple[str, str] = ("", "")
    kernels: Literal["usual", "own", ""] = ""
    substitutes: tuple[tuple[OpKind, ...], ...] = ()
    price: Price = Price()

    @property
    def outputs(self) -> Ranks:
        """The ranks that take into a tensor that is not the one they give."""
        return "" if self.in_place else self.takes

    def givers(self, position: int, count: int, root: int) -> Sequence[int]:
        """The positions of the ranks whose values the one at a position takes, in order; `root` is the root's."""
        if self.gives == "root":
            return (root,)
        return self.sources(position, count) if self.gives else ()


def has_part(who: Ranks, rank: int, root: int, peer: int) -> bool:
    """Whether a rank of an operation is one of these."""
    if who == "others":
        return rank != root
    return who == "all" or (who != "" and rank == (root if who == "root" else peer))


def _before(position: int, count: int) -> Sequence[int]:
    # MPI leaves the result of an exscan on its first rank undefined; here that is what the rank gives.
    return range(max(position, 1))


PAIR = (OpKind.SEND, OpKind.RECV)

_SPECS = (
    OperationSpec(
        kind=OpKind.ALLREDUCE,
        folds=True,
        in_place=True,
        refs=("tensor_refs", ""),
        substitutes=((OpKind.REDUCE, OpKind.BROADCAST),),
        kernels="usual",
        price=Price(
            memory=lambda at: at.copies(2 * (at.world - 1) / at.world, 2 * (at.world - 1)),
            mesh=lambda at: at.all_to_all(1 / at.world).times(2),
            ring=lambda at: at.ring(2 * (at.world - 1) / at.world, 2 * (at.world - 1)),
            by_host=lambda at: at.host_by_host(2 * (at.hosts - 1) / at.hosts, 2 * (at.hosts - 1), rounds=2, inside=2),
        ),
    ),
    OperationSpec(
        kind=OpKind.REDUCE,
        takes="root",
        folds=True,
        in_place=True,
        root="dst_rank",
        refs=("tensor_refs", ""),
        substitutes=((OpKind.ALLREDUCE,),),
        kernels="usual",
        price=Price(
            memory=lambda at: at.copies(1, (at.world - 1) + (at.world - 1) / at.world),
            # Of two ranks, both sides would send as many bytes either way, so one sends its whole tensor.
            mesh=lambda at: at.at_root(1) if at.world == 2 else at.all_to_all(1 / at.world) + at.at_root(1 / at.world),
            ring=lambda at: at.ring((at.world - 1) / at.world, at.world - 1) + at.at_root(1 / at.world),
            by_host=lambda at: at.host_by_host(
                2 * (at.hosts - 1) / at.hosts, (at.hosts - 1) * (1 + 1 / at.hosts), rounds=2, inside=1
            ),
        ),
    ),
    OperationSpec(
        kind=OpKind.BROADCAST,
        gives="root",
        takes="others",
        makes=False,
        root="src_rank",
        refs=("tensor_refs", ""),
        substitutes=(PAIR,),
        kernels="usual",
        price=Price(
            mesh=lambda at: at.at_root(1) if at.world == 2 else at.passed_on(1 / (at.world - 1)),
            ring=lambda at: at.tree(),
            by_host=lambda at: at.host_by_host(1, at.hosts - 1, rounds=2, inside=1),
        ),
    ),
    OperationSpec(
        kind=OpKind.ALLGATHER,
        takes_pieces=True,
        refs=("tensor_refs", "tensor_list_refs"),
        substitutes=((OpKind.GATHER, OpKind.BROADCAST), PAIR),
        kernels="usual",
        price=Price(
            ring=lambda at: at.ring(at.world - 1, at.world - 1),
            # Each piece once to every other host; n is what a rank gives, so that all together have w of them.
            by_host=lambda at: at.host_by_host(
                max(at.largest * (at.hosts - 1), at.world - at.smallest),
                at.world * (at.hosts - 1),
                rounds=1,
                inside=at.world,
            ),
        ),
    ),
    OperationSpec(
        kind=OpKind.REDUCESCATTER,
        gives_pieces=True,
        folds=True,
        refs=("tensor_list_refs", "tensor_refs"),
        substitutes=((OpKind.REDUCE, OpKind.SCATTER),),
        kernels="usual",
        price=Price(by_host=lambda at: at.host_by_host((at.hosts - 1) / at.hosts, at.hosts - 1, rounds=1, inside=1)),
    ),
    OperationSpec(
        kind=OpKind.GATHER,
        takes="root",
        takes_pieces=True,
        root="dst_rank",
        refs=("tensor_refs", "tensor_list_ref"),
        substitutes=((OpKind.ALLGATHER,), PAIR),
        kernels="usual",
        price=Price(memory=lambda at: at.copies(1, at.world - 1)),  # each rank copies into the root's memory
    ),
    OperationSpec(
        kind=OpKind.SCATTER,
        gives="root",
        gives_pieces=True,
        root="src_rank",
        refs=("tensor_list_ref", "tensor_refs"),
        substitutes=(PAIR,),
        kernels="usual",
    ),
    OperationSpec(
        kind=OpKind.ALLTOALL,
        gives_pieces=True,
        takes_pieces=True,
        refs=("tensor_list_in_refs", "tensor_list_out_refs"),
        substitutes=(PAIR,),
        kernels="usual",
    ),
    OperationSpec(
        kind=OpKind.SCAN,
        folds=True,
        in_place=True,
        sources=lambda position, count: range(position + 1),
        refs=("tensor_refs", ""),
        kernels="own",
    ),
    OperationSpec(
        kind=OpKind.EXSCAN,
        folds=True,
        in_place=True,
        sources=_before,
        refs=("tensor_refs", ""),
        kernels="own",
    ),
    OperationSpec(
        kind=OpKind.SEND,
        gives="root",
        takes="peer",
        root="source rank",
        refs=("refs", ""),
        kernels="usual",
    ),
    OperationSpec(
        kind=OpKind.BARRIER,
        gives="",
        takes="",
        substitutes=((),),  # the agreement before the launch
        kernels="usual",
    ),
)


def by_kind(specs: Sequence[OperationSpec]) -> dict[OpKind, OperationSpec]:
    """Builds the table of operations.

    Raises:
        ValueError: An operation that folds has a substitute that does not, or the other way round; or an operation
            without fold or pieces takes the values of several ranks.
    """
    folds = {spec.kind for spec in specs if spec.folds}
    for spec in specs:
        for needs in spec.substitutes:
            if needs and spec.folds != any(kind in folds for kind in needs):
                does, names = "folds" if spec.folds else "does not fold", [kind.value for kind in needs]
                raise ValueError(f"{spec.kind.value} {does} values, unlike its substitute {names}")
        if spec.gives == "all" and not (spec.folds or spec.takes_pieces) and len(spec.sources(0, 2)) != 1:
            raise ValueError(f"{spec.kind.value} has no fold or pieces for the values of several sources")
    return {spec.kind: spec for spec in specs}


OPERATIONS: dict[OpKind, OperationSpec] = by_kind(_SPECS)
"""Every operation; the RECV of a receiver is its half of a SEND."""

PIECES: dict[OpKind, tuple[bool, bool]] = {
    OpKind.RECV: (False, False),
    **{spec.kind: (spec.gives_pieces, spec.takes_pieces) for spec in _SPECS},
}
"""Operation -> whether what a rank gives, and what it takes, is one piece per rank."""

PIECEWISE = frozenset(kind for kind, sides in PIECES.items() if any(sides))
"""The operations in which a rank gives or takes pieces."""

FOLDS = tuple(spec.kind for spec in _SPECS if spec.folds)
"""The operations that have a reduce op."""

PARTIAL_FOLDS = tuple(spec.kind for spec in _SPECS if spec.folds and spec.sources is not _everyone)
"""Those that fold the values of other ranks for each rank (`OperationSpec.sources`), as MPI_Scan and MPI_Exscan."""

USUAL = frozenset({OpKind.RECV, *(spec.kind for spec in _SPECS if spec.kernels == "usual")})
"""The operations that a backend runs which does not say."""

ALL_KERNELS = USUAL | {spec.kind for spec in _SPECS if spec.kernels == "own"}
"""Those that the backends of this package run."""
