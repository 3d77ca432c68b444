"""The agreement before launch (P3), as a pure state machine.

Every rank of a plan sends the operation that it is about to run (`Spec`), or the reasons why it can't. `decide`
compares the arrivals of all: without violations kernels start on all ranks, else on none. Every rank compares the same
bytes, so all reach the same verdict on any transport.

In each round a participant sends the arrivals of all its requests of that round in one message, in which equal arrivals
are sent once: a single call is a batch of one.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import chain
from typing import Any, NamedTuple

from raycollect.core.codec import Codec, Wire
from raycollect.core.model import TENSOR, OpKind, Structure, TensorInfo
from raycollect.core.operations import PIECES
from raycollect.core.weighted_cache import WeightedCache
from raycollect.errors import InternalError, ProtocolError, Violation
from raycollect.planner import Program

LONG_NBYTES = 4096
"""The size from which an arrival is compressed: backends bound the size of arrivals."""

_CACHED_WEIGHT = 1 << 15  # the most tensors in each half of a cache: 13 MB, as a description takes some 400 bytes
_ENTRY_WEIGHT = 8  # of a cached result without tensors
_RANKS_PER_WEIGHT = 25  # a key and a verdict refer to something of each rank
_NBYTES_PER_WEIGHT = 400

_CALLERS = {"plan": "a plan", "call": "an imperative call"}


class Side(Wire, frozen=True, kw_only=True):
    """The tensors that a rank gives, or takes."""

    # In pieces: a list with one item per rank
    tensors: tuple[TensorInfo, ...]
    loose: bool = False  # the pieces are cut from one contiguous tensor: their sizes count, not their shapes
    structure: Structure

    def __post_init__(self) -> None:
        if self.structure.count != len(self.tensors):
            raise ValueError(f"{len(self.tensors)} tensors for a {self.structure}")

    def item(self, at: int) -> Side:
        """One piece."""
        before = sum(item.count for item in self.structure.items[:at])
        structure = self.structure.items[at]
        return Side(structure=structure, tensors=self.tensors[before : before + structure.count], loose=self.loose)


def piece_fault(structure: Structure, infos: Sequence[TensorInfo], count: int) -> tuple[str, str, str]:
    """The fields (kind, found, expected) of the violation of a value that can't be cut into a piece for each rank."""
    if structure.kind in ("list", "tuple") and len(structure.items) == count:
        return "mismatch", str(structure), "pieces of equally many tensors"
    actual = str(infos[0]) if structure.kind == "tensor" else str(structure)
    expected = f"a list of {count}, one per rank, or one contiguous tensor whose first dimension {count} divides"
    return "argument", actual, expected


class Spec(Wire, frozen=True, kw_only=True):
    """The operation that a rank is about to run."""

    caller: str = "plan"  # or "call": an imperative call
    reduce_op: str = ""
    root: int = -1
    gives: Side | None = None  # None if it gives nothing, or failed to describe it
    takes: Side | None = None  # None if it works in place, or its output is still to be made
    one_device: bool = False  # tensors are not staged, so all must be on one kind of device (`GroupSpec.memory`)
    op: str

    def __post_init__(self) -> None:
        if self.caller not in _CALLERS:
            raise ValueError(f"no such caller: {self.caller!r}")
        OpKind(self.op)


class Arrival(Wire, frozen=True, kw_only=True):
    """The contribution of one rank: a spec, and violations where it is unable to run."""

    violations: tuple[Violation, ...] = ()
    spec: Spec


_ARRIVALS = Codec[Arrival](Arrival, "arrival", long_nbytes=LONG_NBYTES)


encode_arrival: Callable[[Arrival], bytes] = _ARRIVALS.encode


decode_arrival: Callable[[bytes], Arrival] = _ARRIVALS.decode


# The field of a violation of an output ends with it, or with it and the giver's rank.
OUTPUT = " of output"

# (position of a rank, the name of the part in messages, the part of its gives or takes)
_FlowSide = tuple[int, str, Side]


def _flows(specs: Sequence[Spec]) -> Iterator[list[_FlowSide]]:
    # Lists of parts that must match: an input and its outputs; without ranks that failed to describe theirs.
    gives = {at: spec.gives for at, spec in enumerate(specs) if spec.gives is not None}
    takes = {at: spec.takes for at, spec in enumerate(specs) if spec.takes is not None}
    in_pieces, out_pieces = PIECES[OpKind(specs[0].op)]
    everyone = range(len(specs))
    if not in_pieces and not out_pieces:  # one value for all
        yield [(at, "", side) for at in everyone for side in (gives.get(at), takes.get(at)) if side is not None]
    elif in_pieces and out_pieces:
        for giver in everyone:
            for taker in everyone:
                given = [(giver, f" of input {taker}", gives[giver].item(taker))] if giver in gives else []
                taken = [(taker, f"{OUTPUT} {giver}", takes[taker].item(giver))] if taker in takes else []
                yield given + taken
    elif out_pieces:
        for giver in everyone:
            given = [(giver, "", gives[giver])] if giver in gives else []
            yield given + [(taker, f"{OUTPUT} {giver}", side.item(giver)) for taker, side in takes.items()]
    else:
        for taker in everyone:
            given = [(giver, f" of input {taker}", side.item(taker)) for giver, side in gives.items()]
            yield given + ([(taker, OUTPUT, takes[taker])] if taker in takes else [])


def learn(specs: Sequence[Spec], at: int, at_root: int, *, of_all: bool = False) -> Side:
    """Returns the output of rank `at`, from the inputs of all; `at_root` is the position of the root.

    `of_all`: returns a scratch for the inputs of all ranks.

    Raises:
        InternalError: A giver has not described its input.
    """
    in_pieces, out_pieces = PIECES[OpKind(specs[at].op)]
    of_all |= out_pieces
    givers = specs if of_all else [specs[at_root]]
    sides = []
    for spec in givers:
        if spec.gives is None:
            raise InternalError(detail=f"a rank said nothing about what it gives to {spec.op}")
        sides.append(spec.gives.item(at) if in_pieces else spec.gives)
    if not of_all:
        return sides[0]
    structure = Structure("list", (), tuple(side.structure for side in sides))
    return Side(structure=structure, tensors=tuple(info for side in sides for info in side.tensors))


# Properties that must be equal on all ranks before their tensors can be compared.
_CALL_FIELDS: dict[str, Callable[[Spec], Any]] = {
    "call": lambda spec: _CALLERS[spec.caller],
    "op": lambda spec: spec.op,
    "reduce op": lambda spec: spec.reduce_op,
    "root": lambda spec: spec.root,
}

# Properties that must be equal for all parts that any rank gives or takes: one kernel moves them (`model.Kernel`).
_KERNEL_FIELDS: dict[str, Callable[[Side], Any]] = {
    "tensor count": lambda side: len(side.tensors),
    "dtype": lambda side: [t.dtype for t in side.tensors],
}

# The same if tensors are not staged; see `Spec.one_device`.
_DEVICE_FIELDS: dict[str, Callable[[Side], Any]] = {
    **_KERNEL_FIELDS,
    "device": lambda side: [t.device.partition(":")[0] for t in side.tensors],
}

# Properties that must be equal for an input and its outputs.
_FLOW_FIELDS: dict[str, Callable[[Side], Any]] = {
    "structure": lambda side: str(side.structure),
    "shape": lambda side: [list(t.shape) for t in side.tensors],
}

_LOOSE_FIELDS = {**_FLOW_FIELDS, "shape": lambda side: [t.size for t in side.tensors]}
_NONE = ("", -1)  # A reduce op and a root where the operation has none
_LONGEST = 400  # how many characters of a value a message shows


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """The result of comparing the arrivals of all ranks."""

    violations: tuple[Violation, ...]  # empty: kernels may start
    specs: tuple[Spec, ...]  # in rank order

    @cached_property
    def most(self) -> tuple[int, ...]:
        """For each tensor, the size of the largest piece that any rank gives or takes; see `model.Kernel.most`."""
        parts = [side for flow in _flows(self.specs) for _, _, side in flow]
        return tuple(map(max, zip(*([info.size for info in side.tensors] for side in parts), strict=False)))


def judge(ranks: tuple[int, ...], blobs: tuple[bytes, ...]) -> Verdict:
    """Decides on encoded arrivals; cached for loops.

    Raises:
        ProtocolError: An arrival is malformed.
    """
    return _cached_verdict((ranks, blobs))


def _judged(encoded: tuple[tuple[int, ...], tuple[bytes, ...]]) -> Verdict:
    ranks, blobs = encoded
    decoded = dict[bytes, Arrival]()  # equal arrivals are one object, which is looked at once
    for rank, blob in zip(ranks, blobs, strict=True):
        if blob not in decoded:
            decoded[blob] = _of_rank(rank, blob)
    arrivals = [decoded[blob] for blob in blobs]
    specs = tuple(arrival.spec for arrival in arrivals)
    try:
        return Verdict(violations=decide(ranks, arrivals), specs=specs)
    except (ValueError, TypeError, LookupError) as exc:
        raise ProtocolError(detail=f"arrivals that can't be compared: {exc}") from exc


def _weight(_: object, verdict: Verdict) -> int:
    specs = {id(spec): spec for spec in verdict.specs}.values()  # equal arrivals are one object
    sides = [side for spec in specs for side in (spec.gives, spec.takes) if side is not None]
    of_ranks = len(verdict.specs) // _RANKS_PER_WEIGHT
    return _ENTRY_WEIGHT + of_ranks + sum(len(side.tensors) for side in sides) + len(verdict.violations)


_cached_verdict = WeightedCache(_judged, _weight, _CACHED_WEIGHT)


def _of_rank(rank: int, blob: bytes) -> Arrival:
    try:
        return decode_arrival(blob)
    except ProtocolError as exc:
        raise _unreadable(rank, exc) from exc


def _unreadable(rank: int, error: ProtocolError) -> ProtocolError:
    """Makes the error of an arrival that can't be read, from that of its codec."""
    return ProtocolError(detail=f"what rank {rank} brought to the consistency check can't be read: {error.detail}")


def decide(ranks: Sequence[int], arrivals: Sequence[Arrival]) -> tuple[Violation, ...]:
    """Compares the arrivals of all ranks, and returns every violation.

    The ranks' own violations are first. Then the operations are compared, and if these are equal, the tensors.
    """
    violations = [violation for arrival in arrivals for violation in arrival.violations]
    specs = [arrival.spec for arrival in arrivals]
    invalid = {
        rank
        for rank, arrival in zip(ranks, arrivals, strict=True)
        if any(v.kind == "argument" for v in arrival.violations)
    }
    for name, read in _CALL_FIELDS.items():
        said = [(rank, read(spec)) for rank, spec in zip(ranks, specs, strict=True)]
        # A rank that has refused its own arguments is not compared with the others.
        violations += _mismatches(name, [value for value in said if value[0] not in invalid or value[1] not in _NONE])
    if any(violation.kind == "mismatch" and violation.field in _CALL_FIELDS for violation in violations):
        return tuple(violations)
    flows = list(_flows(specs))
    everything = [part for flow in flows for part in flow]
    alike = _DEVICE_FIELDS if any(spec.one_device for spec in specs) else _KERNEL_FIELDS
    for parts, fields in [(everything, alike), *((flow, _fields(flow)) for flow in flows)]:
        for name, look in fields.items():
            values = {key: look(side) for key, side in {id(side): side for _, _, side in parts}.items()}
            violations += _mismatches(
                name,
                [(ranks[at], values[id(side)]) for at, _, side in parts],
                [of for _, of, _ in parts],
                [side.structure for _, _, side in parts],
            )
    return tuple(dict.fromkeys(violations))


def _fields(flow: Sequence[_FlowSide]) -> dict[str, Callable[[Side], Any]]:
    return _LOOSE_FIELDS if any(side.loose for _, _, side in flow) else _FLOW_FIELDS


def _mismatches(
    name: str, values: Sequence[tuple[int, Any]], parts: Sequence[str] = (), structures: Sequence[Structure] = ()
) -> list[Violation]:
    # The violations of ranks whose value differs from the most common one; on a tie, from the first.
    parts, structures = parts or [""] * len(values), structures or [TENSOR] * len(values)
    objects = {id(value): value for _, value in values}
    distinct = list[Any]()
    alike = {}  # the id of a value -> its place among the distinct ones
    for key, value in objects.items():
        if value not in distinct:
            distinct.append(value)
        alike[key] = distinct.index(value)
    if len(distinct) < 2:
        return []
    expected = distinct[Counter(alike[id(value)] for _, value in values).most_common(1)[0][0]]
    return [
        Violation(
            kind="mismatch",
            rank=rank,
            field=name + part,
            found=_show(value, expected, structure),
            expected=_show(expected, value, structure),
        )
        for (rank, value), part, structure in zip(values, parts, structures, strict=True)
        if value != expected
    ]


def _show(value: Any, other: Any, structure: Structure) -> str:
    # A long list is shown from the first difference on, with the path of that tensor.
    if not isinstance(value, list):
        return "none" if value in _NONE else str(value)
    text = ", ".join(map(str, value))
    if len(text) <= _LONGEST:
        return text
    same = next((at for at, (a, b) in enumerate(zip(value, other, strict=False)) if a != b), len(other))
    text = f"(from {same} on, {structure.path(same)}) " + ", ".join(map(str, value[same : same + _LONGEST]))
    return text if len(text) <= _LONGEST else text[:_LONGEST] + "..."


# ------------------------------------------------------------------------------------ all requests of a plan


def is_batch(program: Program) -> bool:
    """Whether a program is part of a plan of several requests."""
    return len(program.tasks) != 1 or bool(program.everyone)


class _BatchArrivals(NamedTuple):
    conflict: bool
    blobs: tuple[bytes, ...]  # distinct
    requests: tuple[int, ...]
    which: tuple[int, ...]  # for each of them the place of its blob


_BATCH_ARRIVALS = Codec[_BatchArrivals](_BatchArrivals, "arrivals", long_nbytes=LONG_NBYTES)


def encode_arrivals(arrivals: Mapping[int, bytes], *, conflict: bool) -> bytes:
    """Writes the arrivals by request of a participant of a batch, for one round; the inverse of `decode_arrivals`.

    `conflict`: requests overlap in memory here, and the plan does not order them.
    """
    distinct = {blob: at for at, blob in enumerate(dict.fromkeys(arrivals.values()))}
    which = tuple([distinct[blob] for blob in arrivals.values()])
    return _BATCH_ARRIVALS.encode(_BatchArrivals(conflict, tuple(distinct), tuple(arrivals), which))


def _decoded_arrivals(data: bytes) -> tuple[bool, Mapping[int, bytes]]:
    conflict, blobs, requests, which = _BATCH_ARRIVALS.decode(data)
    try:
        return conflict, dict(zip(requests, [blobs[at] for at in which], strict=True))
    except (LookupError, ValueError) as exc:
        raise ProtocolError(detail=f"malformed arrivals: {exc}") from exc


def _weight_of_arrivals(_: object, arrivals: tuple[bool, Mapping[int, bytes]]) -> int:
    blobs = set(arrivals[1].values())
    return _ENTRY_WEIGHT + len(arrivals[1]) + sum(map(len, blobs)) // _NBYTES_PER_WEIGHT


decode_arrivals: Callable[[bytes], tuple[bool, Mapping[int, bytes]]]
decode_arrivals = WeightedCache(_decoded_arrivals, _weight_of_arrivals, _CACHED_WEIGHT)
"""Reads the arrivals of a participant of a batch; raises ProtocolError on other bytes."""


class Agreement:
    """The arrivals of all participants of a plan so far.

    Attributes:
        conflict: Whether requests overlap in memory on any participant, and the plan does not order them.
        verdicts: Request -> the verdict of its last round.
    """

    def __init__(self, program: Program) -> None:
        self.conflict: bool = False
        self.verdicts: dict[int, Verdict] = {}
        self._program = program
        self._arrivals: list[dict[int, bytes]] = [{} for _ in program.agreement.ranks]  # the latest by request

    def meet(self, blobs: Sequence[bytes]) -> tuple[Violation, ...]:
        """Judges one round of blobs, by place; returns every violation of all requests.

        Raises:
            ProtocolError: The blobs are no arrivals of this plan.
        """
        now = set[int]()
        for rank, latest, blob in zip(self._program.agreement.ranks, self._arrivals, blobs, strict=True):
            try:
                conflict, arrivals = decode_arrivals(bytes(blob))
            except ProtocolError as exc:
                raise _unreadable(rank, exc) from exc
            self.conflict |= conflict
            latest.update(arrivals)
            now.update(arrivals)
        violations = {request: self._judge(request).violations for request in sorted(now)}
        if not is_batch(self._program):
            return tuple(chain.from_iterable(violations.values()))
        return tuple(replace(violation, call=request) for request, some in violations.items() for violation in some)

    def _judge(self, request: int) -> Verdict:
        # The earlier arrival of a participant without a new one in this round still counts.
        program, arrivals = self._program, self._arrivals
        try:
            if program.everyone:
                ranks, places = program.everyone[request]
                arrivals = [arrivals[place] for place in places]
            else:
                ranks = program.shares[program.tasks[request].share].ranks
            verdict = self.verdicts[request] = judge(ranks, tuple([latest[request] for latest in arrivals]))
            return verdict
        except LookupError as exc:
            raise ProtocolError(detail=f"request {request} was not brought by all of its ranks") from exc


def encode_single(arrival: bytes) -> bytes:
    """Writes the arrival of a plan's only request; the inverse of `decode_single`."""
    return encode_arrivals({0: arrival}, conflict=False)


def decode_single(rank: int, data: bytes) -> bytes:
    """Reads a rank's arrival of a plan's only request; raises ProtocolError on other bytes."""
    try:
        _, arrivals = decode_arrivals(bytes(data))
    except ProtocolError as exc:
        raise _unreadable(rank, exc) from exc
    if 0 not in arrivals:
        raise _unreadable(rank, ProtocolError(detail="it is of another plan"))
    return arrivals[0]
