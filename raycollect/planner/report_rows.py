"""What an explanation consists of: calls, the ways to carry them out, what moves, and what it costs."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Act:
    """What some ranks do for a call."""

    ranks: tuple[int, ...]
    steps: tuple[str, ...]  # in order, as "send piece 2 to rank 1, in place (launch 3)"


@dataclass(frozen=True, slots=True, kw_only=True)
class Way:
    """One algorithm that a call may take."""

    name: str
    at_least: int  # the least bytes per rank from which it is taken
    time_s: float  # its time for the bytes of the call and those that travel with it, in seconds
    nbytes_inside: int  # the bytes that all ranks together would move inside hosts for this call
    nbytes_between: int  # the same between hosts


@dataclass(frozen=True, slots=True, kw_only=True)
class Brought:
    """What some ranks copy to the memory where the backend works, and back, as their tensors lie elsewhere."""

    ranks: tuple[int, ...]  # the ranks, ascending
    device: str  # where their tensors lie: "cuda:0"
    memory: str  # where the backend works: "cpu", "cuda"
    nbytes_there: int  # the bytes that each of them copies there
    nbytes_back: int  # the bytes that each of them copies back


@dataclass(frozen=True, slots=True, kw_only=True)
class MovedRank:
    """What one rank moves in a reshard."""

    rank: int
    nbytes_sent: int  # to other ranks
    nbytes_received: int  # from other ranks
    nbytes_own: int  # from its own tensors
    staging: int  # the bytes in which its messages are packed


@dataclass(frozen=True, slots=True, kw_only=True)
class MovedLink:
    """What one rank owes another in a reshard."""

    giver: int
    taker: int
    nbytes: int
    is_between: bool  # whether they are on different hosts


@dataclass(frozen=True, slots=True, kw_only=True)
class Moved:
    """What a reshard moves, and who gives what to whom."""

    ranks: tuple[MovedRank, ...]
    links: tuple[MovedLink, ...]
    rounds: int  # how many exchanges there are
    pieces: int  # how many boxes travel
    least_between: int  # the least bytes that any plan moves between hosts; -1: not known, for partial sums

    @property
    def nbytes_inside(self) -> int:
        """The bytes between ranks of one host."""
        return sum(one.nbytes for one in self.links if not one.is_between)

    @property
    def nbytes_between(self) -> int:
        """The bytes between hosts."""
        return sum(one.nbytes for one in self.links if one.is_between)


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One call."""

    call: int  # its place in the batch, from 0
    op: str  # the operation, with its reduce op and root
    group: str
    backend: str
    chosen: str  # why the group has this backend, if nobody named one; or empty
    ranks: tuple[int, ...]
    tensors: int  # how many tensors a rank gives
    dtypes: tuple[str, ...]  # their distinct dtypes
    nbytes: int  # the most bytes that a rank gives
    after: tuple[int, ...]  # the calls that must run before it, because one of the two writes what the other uses
    bundle: int  # its place in the execution order; calls with the same place run together
    packed: tuple[int, int, int]  # how many tensors of its bundle travel packed, of how many, and in how many kernels
    together: int  # how many tensors of its bundle the backend runs with one synchronization of the ranks
    algorithm: str
    why: str
    bits: str  # what is promised about the bits of a reduction (P7); empty for other operations
    ways: tuple[Way, ...]  # all algorithms that it could take, in the planner's order
    launches: tuple[int, ...]  # the launches of the plan in which it runs; 0 is that of the agreement
    acts: tuple[Act, ...]  # what the ranks do
    made_nbytes: int  # the most bytes of output that are made on a rank
    scratch_nbytes: int  # the most bytes of scratch that are made on a rank
    brought: tuple[Brought, ...]  # what is copied to where the backend works, and back
    time_s: float  # how long its bundle takes, in seconds
    moved: Moved | None = None  # what a reshard moves; None for other operations

    @property
    def way(self) -> Way:
        """The algorithm that is taken."""
        return next(way for way in self.ways if way.name == self.algorithm)


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkCost:
    """What links are taken to cost; see `raycollect.planner.Link`."""

    place: str  # "inside": between ranks of one host; "between": between hosts, in an exchange of all with all
    latency_s: float
    bandwidth: float  # in bytes per second
    source: str  # "assumed", "from the file"


@dataclass(frozen=True, slots=True, kw_only=True)
class Memory:
    """The most memory that a participant needs beyond the operands, in bytes."""

    outputs: int  # what is made for the user
    scratch: int  # what is made for the steps only
    packing: int  # the staging of tensors that travel packed
    stand_ins: int  # copies, where the backends work, of tensors that lie elsewhere
    chunks: tuple[tuple[str, int], ...]  # for each group: (its name, the chunks of its backend; -1: unknown)


@dataclass(frozen=True, slots=True, kw_only=True)
class Invoked:
    """A method call of a captured step."""

    call: int  # its place among all calls of the step, from 0
    actor: str
    method: str
    after: tuple[int, ...]  # the calls whose results it takes


@dataclass(frozen=True, slots=True, kw_only=True)
class Methods:
    """A stage of a captured step: method calls with no collective between them."""

    calls: tuple[Invoked, ...]  # the calls, in order; those of different actors run at the same time
    fixed: int = 0  # how many refs are among their arguments
