"""Repeated kernels of `nccl`: their cached scripts, and when they run as CUDA graphs.

Theory. A captured step uses the same `Kernel` objects in each run, and so does a call that is repeated with the same
refs. A kernel enqueues the same work each time, so its script is cached, and after two runs it is captured in a CUDA
graph. Later runs are one driver call each.
NCCL requires that all ranks launch the graphs of one capture, or none does. So each rank sends a `Word` with its
arrival, and `way_of` derives the same decision from all words on every rank:

1. Some rank has no script yet, can't capture its kernel, failed to capture it, or runs a different kernel: plain.
2. All could capture it: plain, and each captures it at the end. A capture launches nothing, so a failure does not
   affect the other ranks; the next word reports it.
3. All have the graph of the same capture: the graph.

Limits. Only NCCL's own work on the kernel's memory is captured: a script without temporary memory, of a kind in
`RECORDED`. Folds by cupy, tensors with gaps and pieces that are not consecutive use memory that is allocated for a run,
and are plain. NCCL has run the kernel before, so it need not connect to ranks during the capture.

Lifetime. NCCL does not end a communicator before the last graph with its kernels is freed. So only `Replays` holds
graphs, and they are dropped before the communicator ends. A graph and its script live as long as their kernel, to whose
arrays they refer.
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
RECORDED = frozenset(OpKind) - {OpKind.BARRIER}  # The kinds that may become graphs; a barrier reduces a temporary byte
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
    """A rank's state of its kernel in the agreement."""

    state: int = _NOT  # 0: it runs plain; 1: it can be captured; 2: it has a graph
    expected: int = 0  # a checksum of the expected arrivals: ranks with different expectations take different paths
    recorded: int = 0  # the launch in which the graph was captured

    def pack(self) -> bytes:
        """Encodes it, to follow the arrival."""
        return _FORMAT.pack(self.state, self.expected, self.recorded)


PLAIN = Word()  # The word of a rank that does not repeat a kernel


def parted(brought: bytes) -> tuple[bytes, Word]:
    """Splits an arrival and the word that follows it."""
    at = len(brought) - _FORMAT.size
    state, expected, recorded = _FORMAT.unpack_from(brought, at)
    return brought[:at], Word(state=state, expected=expected, recorded=recorded)


def way_of(words: Sequence[Word]) -> Way:
    """Returns the decision of all ranks, given the words of all."""
    if any(word.state == _NOT for word in words) or len({word.expected for word in words}) > 1:
        return Way.PLAIN
    same = all(word.state == _HAS for word in words) and len({word.recorded for word in words}) == 1
    return Way.GRAPH if same else Way.RECORD


def is_same(agreed: Kernel, kernel: Kernel) -> bool:
    """Tells whether a kernel is the one of the agreement, except for values that the agreement has set."""
    if agreed is kernel:
        return True
    alike = (agreed.kind, agreed.op, agreed.peer) == (kernel.kind, kernel.op, kernel.peer)
    return alike and _is_same_side(agreed.src, kernel.src) and _is_same_side(agreed.dst, kernel.dst)


def _is_same_side(side: Any, other: Any) -> bool:
    if type(side) is not tuple or type(other) is not tuple:
        return side is other
    return len(side) == len(other) and all(a is b for a, b in zip(side, other, strict=True))


@dataclass(frozen=True, slots=True, kw_only=True)
class GraphCounts:
    """Statistics of repeated kernels."""

    current: int = 0  # graphs that can be launched
    recorded: int = 0  # captures
    launched: int = 0  # launches of graphs
    failed: int = 0  # failed captures


@dataclass(slots=True, eq=False)
class _CachedKernel:
    """The cached script and graph of one kernel."""

    scripts: list[Script] | None = None
    graph: Any = None
    recorded: int = 0
    may: bool = True
    expected: Sequence[bytes] = field(default=())
    checksum: int = 0


class Replays:
    """One communicator's cache of repeated kernels; used by one thread at a time, `drop` by any."""

    def __init__(self, *, records: bool) -> None:
        self._records = records
        self._lock = threading.Lock()  # guards what follows
        self._cache: weakref.WeakKeyDictionary[Tie, _CachedKernel] = weakref.WeakKeyDictionary()
        self._recorded: weakref.WeakSet[Tie] = weakref.WeakSet()  # kernels with a graph
        self._is_over = False
        self._counts: Counter[str] = Counter()

    def word(self, kernel: Kernel, expected: Sequence[bytes]) -> Word:
        """Returns the word for a repeated kernel, and begins to cache its script."""
        cached = self._of(kernel)
        if cached is None:
            tie, cached = Tie(), _CachedKernel()
            with self._lock:
                self._cache[tie] = cached
            kernel.memo[_NAME] = tie
        if cached.expected is not expected:
            cached.expected, cached.checksum = expected, _checksum(expected)
        if cached.graph is not None:
            return Word(state=_HAS, expected=cached.checksum, recorded=cached.recorded)
        state = _COULD if cached.scripts is not None and self._may(kernel, cached) else _NOT
        return Word(state=state, expected=cached.checksum)

    def scripts(self, kernel: Kernel, make: Callable[[], list[Script]]) -> list[Script]:
        """Returns the scripts of a kernel; caches them if they use no temporary memory."""
        cached = self._of(kernel)
        if cached is None:
            return make()
        if cached.scripts is None:
            scripts = make()
            if len(scripts) != 1 or not scripts[0].is_bare:
                return scripts
            cached.scripts = scripts
        return cached.scripts

    def launch(self, kernel: Kernel, stream: Any) -> None:
        """Enqueues the graph of a kernel."""
        cached = self._of(kernel)
        try:
            cached.graph.launch(stream)  # type: ignore[union-attr]  # all words say that there is a graph
        except BaseException as exc:
            traceback.clear_frames(exc.__traceback__)  # they may hold the graph
            raise
        self._counts["launched"] += 1

    def record(self, kernel: Kernel, seq: int, capture: Callable[[], Any]) -> Exception | None:
        """Captures the graph of a kernel that ran in launch `seq`; returns the error if that fails."""
        cached = self._of(kernel)
        if cached is None:
            return None
        self._let_go(kernel, cached)
        try:
            graph = capture()
        except Exception as exc:  # noqa: BLE001 - the driver's, NCCL's or cupy's; the kernel stays plain
            traceback.clear_frames(exc.__traceback__)
            cached.may = False
            self._counts["failed"] += 1
            return exc
        self._counts["recorded"] += 1
        with self._lock:
            if not self._is_over:
                cached.graph, cached.recorded = graph, seq
                self._recorded.add(kernel.memo[_NAME])
        return None

    def forget(self, kernel: Kernel) -> None:
        """Drops the graph of a kernel that other ranks can't launch; it may be captured again."""
        cached = self._of(kernel)
        if cached is not None:
            self._let_go(kernel, cached)

    def drop(self) -> None:
        """Drops all graphs, also those being captured."""
        with self._lock:
            self._is_over = True
            entries = list(self._cache.values())
            self._recorded.clear()
        for entry in entries:
            entry.graph = entry.scripts = None

    @property
    def counts(self) -> GraphCounts:
        """Statistics of repeated kernels so far."""
        return GraphCounts(current=len(self._recorded), **self._counts)

    def _of(self, kernel: Kernel) -> _CachedKernel | None:
        tie = kernel.memo.get(_NAME)
        return None if tie is None else self._cache.get(tie)

    def _may(self, kernel: Kernel, cached: _CachedKernel) -> bool:
        return self._records and cached.may and kernel.kind in RECORDED and len(self._recorded) < GRAPHS

    def _let_go(self, kernel: Kernel, cached: _CachedKernel) -> None:
        cached.graph = None
        with self._lock:
            self._recorded.discard(kernel.memo[_NAME])


def _checksum(blobs: Sequence[bytes]) -> int:
    return zlib.crc32(b"".join([len(blob).to_bytes(8, "little") + blob for blob in blobs]))
