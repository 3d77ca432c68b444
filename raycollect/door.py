"""The door: the agreement before launch (P3), as a pure state machine.

Every rank of a plan arrives with what it is about to do (`Spec`), or with the reasons why it can't. When all are
there, `decide` compares: no violation, and the kernels may start on all; any violation, and they start on none. The
same bytes are compared on every rank, so all come to the same verdict whoever carries them: a shared page, or the star
over the channel.
"""

from __future__ import annotations

import enum
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import lru_cache
from typing import Any

import msgpack

from raycollect.errors import InternalError, ProtocolError, Violation
from raycollect.model import TensorInfo


@dataclass(frozen=True, slots=True, kw_only=True)
class Spec:
    """What a rank is about to do.

    Attributes:
        op: The operation's name.
        reduce_op: The reduce op's name; empty where there is none.
        root: The root rank; -1 where there is none.
        structure: ``"tensor"``, ``"list"``, ... of its operand; empty where it takes what comes.
        names: The keys of a dict.
        tensors: The infos of its operand's tensors; None where it takes what comes.
    """

    op: str
    reduce_op: str = ""
    root: int = -1
    structure: str = ""
    names: tuple[str | int, ...] = ()
    tensors: tuple[TensorInfo, ...] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Arrival:
    """One rank at the door: ready with a spec, or unable with violations."""

    spec: Spec
    violations: tuple[Violation, ...] = ()


def encode_arrival(arrival: Arrival) -> bytes:
    """Writes an arrival; the inverse of `decode_arrival`."""
    spec = arrival.spec
    tensors = None
    if spec.tensors is not None:
        tensors = [(t.shape, t.dtype, t.itemsize, t.device) for t in spec.tensors]
    packed: bytes = msgpack.packb(
        (
            spec.op,
            spec.reduce_op,
            spec.root,
            spec.structure,
            spec.names,
            tensors,
            [asdict(v) for v in arrival.violations],
        )
    )
    return packed


@lru_cache(maxsize=256)
def decode_arrival(data: bytes) -> Arrival:
    """Reads an arrival.

    Raises:
        ProtocolError: The bytes are no arrival.
    """
    try:
        op, reduce_op, root, structure, names, tensors, violations = msgpack.unpackb(data)
        infos = None
        if tensors is not None:
            infos = tuple(
                TensorInfo(shape=tuple(shape), dtype=dtype, itemsize=itemsize, device=device)
                for shape, dtype, itemsize, device in tensors
            )
        spec = Spec(op=op, reduce_op=reduce_op, root=root, structure=structure, names=tuple(names), tensors=infos)
        return Arrival(spec=spec, violations=tuple(Violation(**v) for v in violations))
    except (ValueError, TypeError, msgpack.UnpackException) as exc:
        raise ProtocolError(detail=f"malformed arrival: {exc}") from exc


# ---------------------------------------------------------------------------------------------- verdict

_FIELDS: dict[str, Callable[[Spec], Any]] = {
    "op": lambda spec: spec.op,
    "reduce op": lambda spec: spec.reduce_op,
    "root": lambda spec: spec.root,
    "structure": lambda spec: spec.structure or None,
    "names": lambda spec: [repr(name) for name in spec.names] or None,
    "tensor count": lambda spec: None if spec.tensors is None else len(spec.tensors),
    "dtype": lambda spec: None if spec.tensors is None else [t.dtype for t in spec.tensors],
    "shape": lambda spec: None if spec.tensors is None else [list(t.shape) for t in spec.tensors],
    "device": lambda spec: None if spec.tensors is None else [t.device.partition(":")[0] for t in spec.tensors],
}
"""What must be equal on all ranks; None: this rank takes what comes."""


_LONGEST = 400
"""How many characters of a value a message shows."""


def decide(ranks: Sequence[int], arrivals: Sequence[Arrival]) -> tuple[Violation, ...]:
    """Compares what all ranks brought.

    Args:
        ranks: The ranks, in the order of `arrivals`.
        arrivals: One arrival per rank.

    Returns:
        Every violation; nothing when the kernels may start. What each rank found wrong itself comes first; ranks are
        compared with each other only among those that could say what they have.
    """
    found = [violation for arrival in arrivals for violation in arrival.violations]
    able = [(rank, arrival.spec) for rank, arrival in zip(ranks, arrivals, strict=True) if not _is_absent(arrival)]
    if len({spec for _, spec in able}) > 1:
        for name, read in _FIELDS.items():
            found += _odd_ones(name, [(rank, read(spec)) for rank, spec in able])
    return tuple(found)


def _is_absent(arrival: Arrival) -> bool:
    return bool(arrival.violations) and arrival.spec.tensors is None


def _odd_ones(name: str, values: list[tuple[int, Any]]) -> list[Violation]:
    """Names the ranks whose value differs from the commonest one (the lowest rank's, if two are as common)."""
    known = [(rank, value) for rank, value in values if value is not None]
    counts = Counter(repr(value) for _, value in known)
    if len(counts) < 2:
        return []
    commonest = counts.most_common(1)[0][0]
    expected = next(value for _, value in known if repr(value) == commonest)
    return [
        Violation(kind="mismatch", rank=rank, field=name, found=_show(value, expected), expected=_show(expected, value))
        for rank, value in known
        if value != expected
    ]


def _show(value: Any, other: Any) -> str:
    """Writes a value for a person; a long list from the first place on where it differs from another."""
    if not isinstance(value, list):
        return str(value)
    text = ", ".join(map(str, value))
    if len(text) <= _LONGEST:
        return text
    same = next((at for at, (a, b) in enumerate(zip(value, other, strict=False)) if a != b), len(other))
    text = f"(from {same} on) " + ", ".join(map(str, value[same:]))
    return text if len(text) <= _LONGEST else text[:_LONGEST] + "..."


# ---------------------------------------------------------------------------------------------- gathering


class DoorState(enum.Enum):
    """Where a door stands."""

    OPEN = "open"
    COMPLETE = "complete"
    ABORTED = "aborted"


_NEXT: dict[tuple[DoorState, str], DoorState] = {
    (DoorState.OPEN, "arrive"): DoorState.OPEN,
    (DoorState.OPEN, "last"): DoorState.COMPLETE,
    (DoorState.OPEN, "abort"): DoorState.ABORTED,
    (DoorState.COMPLETE, "abort"): DoorState.COMPLETE,
    (DoorState.ABORTED, "arrive"): DoorState.ABORTED,
    (DoorState.ABORTED, "last"): DoorState.ABORTED,
    (DoorState.ABORTED, "abort"): DoorState.ABORTED,
}


class Door:
    """Gathers the arrivals of one round of one plan, for carriers that gather in one place.

    Args:
        ranks: The ranks that must come, ascending.
    """

    def __init__(self, ranks: Sequence[int]) -> None:
        self._ranks = tuple(ranks)
        self._blobs: dict[int, bytes] = {}
        self.state = DoorState.OPEN

    @property
    def missing(self) -> tuple[int, ...]:
        """The ranks that have not come."""
        return tuple(rank for rank in self._ranks if rank not in self._blobs)

    @property
    def blobs(self) -> tuple[bytes, ...]:
        """What they brought, in the order of the ranks; only when complete.

        Raises:
            InternalError: Not all have come.
        """
        if self.state is not DoorState.COMPLETE:
            raise InternalError(detail=f"the door is {self.state.value}, ranks {self.missing} are missing")
        return tuple(self._blobs[rank] for rank in self._ranks)

    def arrive(self, rank: int, blob: bytes) -> DoorState:
        """A rank comes.

        Raises:
            ProtocolError: It is no rank of this plan, came twice, or the door is complete.
        """
        if rank not in self._ranks:
            raise ProtocolError(detail=f"rank {rank} has no part in this plan, whose ranks are {self._ranks}")
        if rank in self._blobs:
            raise ProtocolError(detail=f"rank {rank} came to the door twice")
        self._blobs[rank] = blob
        return self._move("arrive" if self.missing else "last")

    def abort(self) -> DoorState:
        """Closes the door for those who are not through it."""
        return self._move("abort")

    def _move(self, event: str) -> DoorState:
        try:
            self.state = _NEXT[self.state, event]
        except KeyError:
            raise ProtocolError(detail=f"{event!r} at a door that is {self.state.value}") from None
        return self.state
