"""Repeated kernels of `nccl`: what is kept of them, and when they run as CUDA graphs.

Theory. A captured step uses the same `Kernel` objects in each run, and so does a call that is repeated with the same
refs. A kernel enqueues the same work each time, so its script is kept, and after two runs it is captured in a CUDA
graph: from then on a run is one driver call.
NCCL requires that all ranks launch the graphs of one capture, or none does. So each rank sends a `Word` with its
arrival, and `way_of` derives the same decision from all words everywhere:

1. Some rank has no script yet, can't capture its kernel, has failed to, or runs another one than before: plain.
2. All could capture it: plain, and each captures it at the end. That launches nothing, so that a rank that fails does
   not affect the others; its next word tells.
3. All have the graph of the same capture: the graph.

What may be captured. Only NCCL's own work on the kernel's memory: a script without temporary memory, of a kind in
`RECORDED`. Folds by cupy, tensors with gaps and pieces that are not consecutive use memory that is allocated for a run,
and are plain. NCCL has run the kernel before, so it need not connect to ranks during the capture.

Lifetime. NCCL does not end a communicator before the last graph with its kernels is gone. So only `Replays` holds
graphs, and whoever ends the communicator drops them first. A graph and its script live as long as their kernel, whose
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

from raycollect.backends.arrays import Tie
from raycollect.backends.nccl.scripts import Script
from raycollect.core.model import Kernel, OpKind

GRAPHS = 64  # The most graphs that a communicator keeps; NCCL holds GPU memory for each
RECORDED = frozenset(OpKind) - {OpKind.BARRIER}  # The kinds that may become graphs; a barrier reduces a byte of its own
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
    """What a rank says of its kernel in the agreement."""

    state: int = _NOT  # 0: it runs plain; 1: it could be captured; 2: there is a graph
    expected: int = 0  # a checksum of the expected arrivals: ranks with different expectations take different paths
    recorded: int = 0  # the launch in which the graph was captured

    def pack(self) -> bytes:
        """Encodes it, to follow the arrival."""
        return _FORMAT.pack(self.state, self.expected, self.recorded)


PLAIN = Word()  # The word of a rank that does not bring a kernel of an earlier run


def parted(brought: bytes) -> tuple[bytes, Word]:
    """Splits an arrival and the word that follows it."""
    at = len(brought) - _FORMAT.size
    state, expected, recorded = _FORMAT.unpack_from(brought, at)
    return brought[:at], Word(state=state, expected=expected, recorded=recorded)


def way_of(words: Sequence[Word]) -> Way:
    """Returns what all ranks do, given the words of all."""
    if any(word.state == _NOT for word in words) or len({word.expected for word in words}) > 1:
        return Way.PLAIN
    same = all(word.state == _HAS for word in words) and len({word.recorded for word in words}) == 1
    return Way.GRAPH if same else Way.RECORD


def is_same(came: Kernel, kernel: Kernel) -> bool:
    """Tells whether a kernel is the one of the agreement, except for what was learned in the agreement."""
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
    """Statistics of repeated kernels."""

    kept: int = 0  # current graphs
    recorded: int = 0  # captures
    launched: int = 0  # launches of graphs
    failed: int = 0  # failed captures


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
    """What one communicator keeps of repeated kernels; used by one thread at a time, `drop` by any."""

    def __init__(self, *, records: bool) -> None:
        self._records = records
        self._lock = threading.Lock()  # guards what follows
        self._kept: weakref.WeakKeyDictionary[Tie, _Kept] = weakref.WeakKeyDictionary()
        self._recorded: weakref.WeakSet[Tie] = weakref.WeakSet()  # of those that have a graph
        self._is_over = False
        self._counts: Counter[str] = Counter()

    def word(self, kernel: Kernel, expected: Sequence[bytes]) -> Word:
        """Returns the word for a kernel that is run again; from now on its script is kept."""
        kept = self._of(kernel)
        if kept is None:
            tie, kept = Tie(), _Kept()
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
        """Returns the scripts of a kernel; keeps them if they use no temporary memory."""
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
        """Captures the graph of a kernel that ran in launch `seq`; returns the error if there is none."""
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
        """Drops the graph of a kernel, which others can't launch; it may be captured again."""
        kept = self._of(kernel)
        if kept is not None:
            self._let_go(kernel, kept)

    def drop(self) -> None:
        """Drops all graphs, also those being captured."""
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
