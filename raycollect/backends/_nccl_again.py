"""Kernels of `nccl` that come again on the same memory: what is kept of them, and when they run as CUDA graphs.

Theory. A captured step brings the same `Kernel` objects in each run, and so does a call that is made again with the
same refs. What is enqueued for one is the same each time, so its script is kept, and after two runs it is recorded in a
CUDA graph: from then on a run is one call of the driver.
NCCL wants that all ranks launch the graphs of one recording, or none does. So each rank brings a `Word` with its
arrival, and `way_of` makes the same of all words everywhere:

1. Some rank has no script yet, can't record its kernel, has failed to, or does not come by the short way: plain.
2. All could record it: plain, and each records it when that has ended. Nothing is launched by that, so that a rank that
   fails leaves the others as they were; its next word says so.
3. All have the graph of the same recording: that.

What may be recorded. Only what NCCL alone does on the memory of the kernel: a script without memory of its own, of a
kind that stands in `RECORDED`. Folds by cupy, tensors with gaps and pieces that don't lie one behind the other go by
memory that is allocated for a run, and are plain. NCCL has been through the kernel before, so that it need not connect
to ranks while it is recorded.

Lifetime. NCCL does not end a communicator before the last graph with its kernels is gone. So nobody but `Replays` has a
graph, and whoever ends the communicator lets go of them first. A graph, and the script, go with their kernel, whose
arrays are the memory that they refer to.
"""

from __future__ import annotations

import struct
import threading
import traceback
import weakref
import zlib
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

from raycollect.model import Kernel, OpKind

from ._nccl_run import Script

__all__ = ["GRAPHS", "PLAIN", "RECORDED", "GraphCounts", "Replays", "Way", "Word", "is_same", "parted", "way_of"]

GRAPHS = 64
"""How many graphs a communicator keeps; NCCL has memory on the GPU for each."""

RECORDED = frozenset(OpKind) - {OpKind.BARRIER}
"""The kinds that may become graphs; a barrier reduces a byte of its own."""

_NAME = "nccl.again"
_FORMAT = struct.Struct("<BIQ")
_NOT, _COULD, _HAS = range(3)


class Way(Enum):
    """How all ranks run a kernel."""

    PLAIN = "plain"
    RECORD = "plain, then recorded"
    GRAPH = "as a graph"


@dataclass(frozen=True, slots=True, kw_only=True)
class Word:
    """What a rank says of its kernel at the door.

    Attributes:
        state: 0: it runs plain; 1: it could be recorded; 2: there is a graph.
        expected: A checksum of what the rank expects all to bring: ranks that expect different things find different
            ways to go on.
        recorded: The launch in which the graph was recorded.
    """

    state: int = _NOT
    expected: int = 0
    recorded: int = 0

    def pack(self) -> bytes:
        """As it travels, behind the arrival."""
        return _FORMAT.pack(self.state, self.expected, self.recorded)


PLAIN = Word().pack()
"""The word of whoever does not come by the short way."""


def parted(brought: bytes) -> tuple[bytes, Word]:
    """An arrival, and the word that travelled behind it."""
    at = len(brought) - _FORMAT.size
    state, expected, recorded = _FORMAT.unpack_from(brought, at)
    return brought[:at], Word(state=state, expected=expected, recorded=recorded)


def way_of(words: Sequence[Word]) -> Way:
    """What all ranks do, given what all said."""
    if any(word.state == _NOT for word in words) or len({word.expected for word in words}) > 1:
        return Way.PLAIN
    same = all(word.state == _HAS for word in words) and len({word.recorded for word in words}) == 1
    return Way.GRAPH if same else Way.RECORD


def is_same(came: Kernel, kernel: Kernel) -> bool:
    """Whether a kernel is the one that came by the short way, but for what was learned at the door."""
    if came is kernel:
        return True
    alike = (came.kind, came.op, came.peer) == (kernel.kind, kernel.op, kernel.peer)
    return alike and _is_same_side(came.src, kernel.src) and _is_same_side(came.dst, kernel.dst)


def _is_same_side(one: Any, other: Any) -> bool:
    if type(one) is not tuple or type(other) is not tuple:
        return one is other
    return len(one) == len(other) and all(a is b for a, b in zip(one, other, strict=True))


@dataclass(frozen=True, slots=True, kw_only=True)
class GraphCounts:
    """What became of kernels that came again.

    Attributes:
        kept: How many graphs there are.
        recorded: How many were recorded.
        launched: How often one was launched.
        failed: How many could not be recorded.
    """

    kept: int = 0
    recorded: int = 0
    launched: int = 0
    failed: int = 0


class _Tie:
    """Lies in the memo of a kernel and lives as long: what is kept of the kernel is found by it, and goes with it."""

    __slots__ = ("__weakref__",)


@dataclass(slots=True, eq=False)
class _Kept:
    """What is kept of one kernel."""

    scripts: list[Script] | None = None
    graph: Any = None
    recorded: int = 0
    may: bool = True
    expected: Sequence[bytes] = field(default=())
    checksum: int = 0


class Replays:
    """What one communicator keeps of kernels that came again; used by one thread at a time, `drop` by any.

    Args:
        records: Whether there are graphs here at all.
    """

    def __init__(self, *, records: bool) -> None:
        self._records = records
        self._lock = threading.Lock()  # guards what follows
        self._kept: weakref.WeakKeyDictionary[_Tie, _Kept] = weakref.WeakKeyDictionary()
        self._recorded: weakref.WeakSet[_Tie] = weakref.WeakSet()  # of those that have a graph
        self._is_over = False
        self._counts: Counter[str] = Counter()

    def word(self, kernel: Kernel, expected: Sequence[bytes]) -> Word:
        """What to say of a kernel that comes by the short way; from now on its script is kept."""
        kept = self._of(kernel)
        if kept is None:
            tie, kept = _Tie(), _Kept()
            with self._lock:
                self._kept[tie] = kept
            kernel.memo[_NAME] = tie
        if kept.expected is not expected:
            kept.expected, kept.checksum = expected, _checksum(expected)
        if kept.graph is not None:
            return Word(state=_HAS, expected=kept.checksum, recorded=kept.recorded)
        state = _COULD if kept.scripts is not None and self._may(kernel, kept) else _NOT
        return Word(state=state, expected=kept.checksum)

    def scripts(self, kernel: Kernel, make: Callable[[], list[Script]]) -> list[Script]:
        """The scripts of a kernel; made, and kept where that takes no memory."""
        kept = self._of(kernel)
        if kept is None:
            return make()
        if kept.scripts is None:
            made = make()
            if len(made) != 1 or not made[0].is_bare:
                return made
            kept.scripts = made
        return kept.scripts

    def launch(self, kernel: Kernel, stream: Any) -> None:
        """Enqueues the graph of a kernel."""
        kept = self._of(kernel)
        try:
            kept.graph.launch(stream)  # type: ignore[union-attr]  # all ranks have one, as the words say
        except BaseException as exc:
            traceback.clear_frames(exc.__traceback__)  # they may have the graph
            raise
        self._counts["launched"] += 1

    def record(self, kernel: Kernel, seq: int, capture: Callable[[], Any]) -> Exception | None:
        """Records the graph of a kernel, in place of one that it may have.

        Args:
            kernel: The kernel; it has run in this launch.
            seq: The launch.
            capture: Gives the graph.

        Returns:
            Why there is none; the kernel stays plain.
        """
        kept = self._of(kernel)
        if kept is None:
            return None
        self._let_go(kernel, kept)
        try:
            made = capture()
        except Exception as exc:  # noqa: BLE001 - the driver's, NCCL's or cupy's own; the kernel goes on without
            traceback.clear_frames(exc.__traceback__)
            kept.may = False
            self._counts["failed"] += 1
            return exc
        self._counts["recorded"] += 1
        with self._lock:
            if not self._is_over:
                kept.graph, kept.recorded = made, seq
                self._recorded.add(kernel.memo[_NAME])
        return None

    def forget(self, kernel: Kernel) -> None:
        """Lets go of the graph of a kernel, which others can't launch; it may be recorded again."""
        kept = self._of(kernel)
        if kept is not None:
            self._let_go(kernel, kept)

    def drop(self) -> None:
        """Lets go of all graphs, and of those that are being recorded."""
        with self._lock:
            self._is_over = True
            kept = list(self._kept.values())
            self._recorded.clear()
        for one in kept:
            one.graph = one.scripts = None

    @property
    def counts(self) -> GraphCounts:
        """What has become of kernels so far."""
        return GraphCounts(kept=len(self._recorded), **self._counts)

    def _of(self, kernel: Kernel) -> _Kept | None:
        tie = kernel.memo.get(_NAME)
        return None if tie is None else self._kept.get(tie)

    def _may(self, kernel: Kernel, kept: _Kept) -> bool:
        return self._records and kept.may and kernel.kind in RECORDED and len(self._recorded) < GRAPHS

    def _let_go(self, kernel: Kernel, kept: _Kept) -> None:
        kept.graph = None
        with self._lock:
            self._recorded.discard(kernel.memo[_NAME])


def _checksum(blobs: Sequence[bytes]) -> int:
    return zlib.crc32(b"".join([len(one).to_bytes(8, "little") + one for one in blobs]))
