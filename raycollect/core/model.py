"""The values that all layers share; their interfaces are in `raycollect.core.protocols`.

Pure: no Ray, no array library. All values are frozen and validated at creation.
"""

from __future__ import annotations

import enum
from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import datetime
from math import prod
from typing import TYPE_CHECKING, Any, Literal, NewType, Protocol

from msgspec import Struct
from msgspec.structs import force_setattr, replace

from raycollect.core.codec import Wire
from raycollect.core.operations import OPS
from raycollect.core.operations import OpKind as OpKind

Key = NewType("Key", bytes)
"""The id of a real ObjectRef: 24 bytes of its task, then the index of the return (little endian, 4 bytes)."""

KEY_NBYTES = 28
TASK_NBYTES = 24

UNKNOWN_TASK = b"\xff" * TASK_NBYTES
"""In place of a method call that is unknown, or whose end is not recorded: an actor task behind it reports it."""


def task_key(task: bytes, index: int) -> Key:
    """Makes the key of the `index`-th return (counted from 1) of a task."""
    if len(task) != TASK_NBYTES or index < 1:
        raise ValueError(f"no such return: task of {len(task)} bytes, index {index}")
    return Key(task + index.to_bytes(4, "little"))


class ReduceOp(enum.Enum):
    """The reduction of elements of several ranks. The first four have the values of `ray.util.collective`."""

    SUM = 0
    PRODUCT = 1
    MIN = 2
    MAX = 3
    AVG = 4
    BAND = 5
    BOR = 6
    BXOR = 7

    if TYPE_CHECKING:

        def __hash__(self) -> int: ...
    else:
        __hash__ = object.__hash__

    @classmethod
    def coerce(cls, op: Any) -> ReduceOp:
        """Accepts a `ReduceOp`, a name such as ``"sum"``, or another library's enum member of the same name.

        Raises:
            ValueError: It names no reduce op; the message lists the existing ones.
        """
        name = op if isinstance(op, str) else getattr(op, "name", None)
        if isinstance(name, str) and name.upper() in cls.__members__:
            return cls[name.upper()]
        raise ValueError(f"no reduce op {op!r}: expected {cls.expected(op)}")

    @classmethod
    def expected(cls, op: Any) -> str:
        """Returns the names to choose from in place of an invalid one, for messages."""
        names = f"one of {', '.join(cls.__members__)}"
        return f"AVG for a mean, or {names}" if isinstance(op, str) and op.lower() in ("mean", "average") else names


class NamedGroup(Protocol):
    """A group, or a membership in one; accepted in place of a group's name."""

    @property
    def name(self) -> str:
        """Its name."""
        ...

    @property
    def world_size(self) -> int:
        """Its number of ranks."""
        ...


GroupLike = str | NamedGroup
"""The type of an operation's group argument."""


def name_of(group: Any) -> Any:
    """Returns the name of a group, given the name, the group, or a membership in it."""
    if type(group) is str:
        return group
    name = getattr(group, "name", None)
    return name if isinstance(name, str) and hasattr(group, "world_size") else group


class TensorInfo(Wire, frozen=True, kw_only=True):
    """The description of a tensor, on which ranks must agree.

    Attributes:
        shape: The extent of each dimension, in elements.
        dtype: numpy's name of the element type, native byte order: ``"float32"``.
        itemsize: Bytes per element.
        device: ``"cpu"``, or ``"cuda:0"``.
        library: Its library: ``"numpy"``, ``"torch"``, ... Ranks need not agree on it; an output allocated like
            a tensor has its library.
    """

    shape: tuple[int, ...]
    dtype: str
    device: str = "cpu"
    library: str = "numpy"
    itemsize: int

    @property
    def size(self) -> int:
        """The number of elements."""
        return prod(self.shape)

    @property
    def nbytes(self) -> int:
        """The number of bytes."""
        return self.size * self.itemsize

    def beside(self, other: TensorInfo) -> TensorInfo:
        """The same on the device of another tensor; if the device differs, also of the other tensor's library."""
        if self.device == other.device:
            return self
        return replace(self, device=other.device, library=other.library)

    def piece(self, count: int) -> TensorInfo | None:
        """One of `count` equal pieces along the first dimension, a single row without it; None if it can't be cut."""
        if not self.shape or self.shape[0] % count:
            return None
        rows, rest = self.shape[0] // count, self.shape[1:]
        return replace(self, shape=rest if rows == 1 and rest else (rows, *rest))

    def __str__(self) -> str:
        return f"{self.dtype}{list(self.shape)} on {self.device}"


class Structure(Wire, frozen=True):
    """The structure of a value of tensors: a tensor, or a list, tuple or dict of such values."""

    kind: Literal["tensor", "list", "tuple", "dict"]
    names: tuple[str | int, ...]  # the keys of a dict, in order; empty for the others
    items: tuple[Structure, ...]  # the structure of each item; empty for a tensor

    @property
    def count(self) -> int:
        """The number of its tensors."""
        return 1 if self.kind == "tensor" else sum(item.count for item in self.items)

    def path(self, index: int) -> str:
        """The path of one of its tensors, such as ``"['layers'][2]"``; empty for the value itself."""
        for name, item in zip(self.names or range(len(self.items)), self.items, strict=False):
            if index < item.count:
                return f"[{name!r}]{item.path(index)}"
            index -= item.count
        return ""

    def build(self, tensors: Sequence[Any]) -> Any:
        """Builds a value of this structure from tensors, in order."""
        if self.kind == "tensor":
            return tensors[0]
        values, at = [], 0
        for item in self.items:
            values.append(item.build(tensors[at : at + item.count]))
            at += item.count
        if self.kind == "dict":
            return dict(zip(self.names, values, strict=True))
        return values if self.kind == "list" else tuple(values)

    def __str__(self) -> str:
        if self.kind == "tensor":
            return "tensor"
        inside = "" if all(item.kind == "tensor" for item in self.items) else f" of {', '.join(map(str, self.items))}"
        return f"{self.kind}{list(self.names) if self.names else f'[{len(self.items)}]'}{inside}"


TENSOR = Structure("tensor", (), ())
"""The structure of a single tensor."""


class Address(Wire, frozen=True, kw_only=True):
    """The address and the secret of a participant's control endpoint."""

    host: str  # the Ray node's IP address
    port: int
    secret: bytes  # 32 bytes that both ends must know; sent through Ray only, never over the socket

    def __repr__(self) -> str:
        return f"Address({self.host}:{self.port})"


class Member(Wire, frozen=True, kw_only=True):
    """One rank of a group, as all processes know it."""

    actor_id: str  # the Ray actor id, in hexadecimal
    actor: str  # its readable name: Worker(3f2a91)
    address: Address
    machine: str  # equal for processes that can share memory (boot id and namespaces)
    node_id: str
    pid: int
    incarnation: str  # identifies the actor's process; it changes when Ray restarts the actor
    ordered: bool  # whether methods run one by one in submission order (P2)
    participant: bool = True  # whether the actor's class has the mixin, so that plans may use its tensors
    # (kind, ids) of the accelerators that Ray gave it, as ("GPU", ("0",))
    accelerators: tuple[tuple[str, tuple[str, ...]], ...] = ()
    rank: int

    def __post_init__(self) -> None:
        force_setattr(self, "accelerators", _frozen(self.accelerators))  # lists, after decoding


class Segment(Wire, frozen=True):
    """Memory of one process that others of its machine can map, or all its memory, which they can read."""

    pid: int
    fd: int  # its descriptor of the memory; -1: all its memory
    token: bytes  # to recognize it: random bytes at the beginning of the memory, or when the process started
    nbytes: int

    def __repr__(self) -> str:
        return f"Segment(pid={self.pid}, fd={self.fd}, nbytes={self.nbytes})"


class BufferRef(Wire, frozen=True):
    """A part of a segment."""

    segment: Segment
    offset: int  # in bytes
    nbytes: int


TRANSPORTS = ("memory", "mesh", "ring")
"""The ways in which backends move data; see `Pricing`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Pricing:
    """How a backend moves data, for the cost model.

    Attributes:
        transport: ``"memory"``: each rank copies from the memory of the others. ``"mesh"``: data goes directly from
            sender to receiver. ``"ring"``: by the rings and trees of a library.
        rings: On a mesh, the operations that a library runs by its rings and trees.
        by_host: On a mesh, whether data enters each host once, so that the backend needs `GroupSpec.hosts`.
    """

    transport: str = "ring"
    rings: frozenset[OpKind] = frozenset()
    by_host: bool = False

    def __post_init__(self) -> None:
        if self.transport not in TRANSPORTS:
            raise ValueError(f"transport is one of {', '.join(TRANSPORTS)}, not {self.transport!r}")
        if (self.rings or self.by_host) and self.transport != "mesh":
            raise ValueError(f"rings and by_host belong to a mesh, not to {self.transport!r}")


BY_RINGS = Pricing()
"""The pricing of most libraries."""


class GroupSpec(Wire, frozen=True, kw_only=True):
    """A group as the planner sees it.

    Attributes:
        name: Its name.
        group_id: A nonce, unique among groups of one name.
        backend: The name of the backend, never ``"auto"``.
        world_size: The number of ranks.
        ops: The values of the `OpKind` that the backend runs itself; the planner builds others from these if it can.
        coalesces: Whether the backend runs several kernels with fewer synchronizations of the ranks.
        memory: The memory in which its kernels work: ``"cpu"``, ``"cuda"``; ranks stage tensors of other devices there.
            Empty: it takes tensors on any device, all on devices of one kind.
        options: The backend's options (`pg_options`): (name, value), sorted by name. Values are
            strings, numbers, booleans, None, and tuples of such values; a dict is a tuple of pairs.
        timeout_s: The default timeout of imperative calls, in seconds.
        hosts: The number of each rank's host, if the backend needs it (`Pricing.by_host`); else empty. With hosts,
            reductions of `tcp` are left folds over the hosts, in rank order inside each (P7).
    """

    name: str
    group_id: str
    backend: str
    ops: tuple[str, ...] = OPS
    coalesces: bool = False
    memory: str = ""
    options: tuple[tuple[str, Any], ...] = ()
    timeout_s: float = 60.0
    hosts: tuple[int, ...] = ()
    world_size: int

    def __post_init__(self) -> None:
        for name in ("name", "group_id", "backend", "memory"):
            if not isinstance(getattr(self, name), str):
                raise TypeError(f"{name} is a string, not {getattr(self, name)!r}")
        if not isinstance(self.world_size, int) or self.world_size < 1:
            raise ValueError(f"a group has at least one rank, not {self.world_size!r}")
        if not isinstance(self.timeout_s, (int, float)):
            raise TypeError(f"timeout_s is a number, not {self.timeout_s!r}")
        for name in ("ops", "options", "hosts"):  # lists, after decoding
            force_setattr(self, name, _frozen(getattr(self, name)))
        if self.hosts and len(self.hosts) != self.world_size:
            raise ValueError(f"{len(self.hosts)} of {self.world_size} ranks have a host")

    @property
    def in_rank_order(self) -> bool:
        """Whether reductions are left folds in rank order, if the backend supports it."""
        return not self.hosts or RANK_ORDER in self.options


RANK_ORDER = ("deterministic", "rank_order")
"""The option for left folds in rank order also between hosts."""


def _frozen(value: Any) -> Any:
    if isinstance(value, datetime):  # msgspec decodes timestamps for `Any`
        raise TypeError(f"an option can't be a time: {value}")
    return tuple(map(_frozen, value)) if isinstance(value, (list, tuple)) else value


class Launch(Struct, frozen=True, kw_only=True):
    """One plan's use of a communicator. It is a Struct because each run creates one: a frozen dataclass takes 0.5 us.

    Attributes:
        seq: The plan's number in its controller's order, from 1 to 2^39. Every rank launches in increasing `seq`.
        ranks: The ranks that take part, ascending.
        timeout_s: How long a rank waits for the others: in the agreement, and again in the launch.
    """

    seq: int
    ranks: tuple[int, ...]
    timeout_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Kernel:
    """One step with its arrays, as a communicator runs it.

    `raycollect.core.operations` has the table of `src` and `dst` by kind. "pieces" in the table are a tuple of arrays,
    one per rank of the launch and in rank order; their sizes may differ from rank to rank, but sender and receiver
    agree on the size of each. All arrays of a kernel have one dtype on all ranks.

    In place: `dst` may be the memory of `src` in ALLREDUCE, REDUCE, SCAN and EXSCAN, of ``src[own rank]`` in SCATTER
    and REDUCESCATTER, ``dst[own rank]`` that of `src` in ALLGATHER and GATHER, and ``dst[r]`` that of ``src[r]`` for
    all r in ALLTOALL. Otherwise, written arrays overlap no other array. The root of a BROADCAST may have a separate
    `dst`, or one array as both.

    Attributes:
        kind: The operation.
        src: The input: an array, pieces, or None.
        dst: The output: an array, pieces, or None.
        op: The reduce op of a reduction.
        peer: The root, or the other rank of a send or receive; else -1.
        most: The size in elements of the largest piece that any rank sends to another in an ALLGATHER, GATHER, SCATTER,
            REDUCESCATTER or ALLTOALL, the same on all ranks; 0 before the agreement, when only this rank's sizes are
            known.
        memo: The backend's cache for these arrays; repeated plans use the same kernel objects. It must not refer to a
            communicator.
        form: The backend's cache for arrays of this layout: kernels that differ only in their memory share it.
    """

    kind: OpKind
    src: Any = None
    dst: Any = None
    op: ReduceOp | None = None
    peer: int = -1
    most: int = 0
    memo: dict[str, Any] = field(default_factory=dict, init=False, repr=False, compare=False)
    form: dict[str, Any] = field(default_factory=dict, repr=False, compare=False)

    @property
    def sample(self) -> Any:
        """One of its arrays, which all have the same dtype; None without arrays."""
        side = self.dst if self.src is None else self.src
        return side[0] if type(side) is tuple else side
