"""The spans of a timeline: what took how long in this process, kept in a ring of fixed size.

Whoever does something that may be timed asks its `Tracer` for the ring; where that is None nothing is recorded, and
nothing else is done. What is noted on the way is a tuple of numbers and of what is known anyhow. It becomes `Span` only
when somebody reads the ring, and never holds a tensor.
"""

from __future__ import annotations

import itertools
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, ClassVar, NamedTuple

import msgpack

from raycollect.words import a_type

__all__ = [
    "AGAIN",
    "CALL",
    "COLLECTIVE",
    "DOOR",
    "KERNEL",
    "KINDS",
    "LIMIT",
    "METHOD",
    "MOST",
    "NO_LABEL",
    "PART",
    "PLAN",
    "RUN",
    "STAGING",
    "WAIT",
    "WAIT_S",
    "Entry",
    "Label",
    "Place",
    "Recorded",
    "Ring",
    "Span",
    "Tracer",
    "decode_recorded",
    "encode_recorded",
]

PLAN, RUN, PART, WAIT, DOOR = "plan", "run", "part", "wait", "door"
COLLECTIVE, KERNEL, STAGING, METHOD, CALL = "collective", "kernel", "staging", "method", "call"
KINDS = (PLAN, RUN, PART, WAIT, DOOR, COLLECTIVE, KERNEL, STAGING, METHOD, CALL)
"""What a span can be of; docs/timeline.md says what each one covers."""

AGAIN = "again"
"""In the ring alone: a part, its door and its one kernel in one entry, for loops whose runs take some 100 us."""

_MOST_LABELLED = 1024
"""How many things are remembered by their labels."""

LIMIT = 65_536
"""How many entries a ring keeps, unless somebody says otherwise: 10 MB of memory at most."""
MOST = 500_000
"""How many it may keep: what a control connection can carry without being given up."""

WAIT_S = 20e-6
"""Shorter waits are none: whoever had not to wait has only looked."""


class Label(NamedTuple):
    """What is known of a piece of work besides its times.

    Attributes:
        op: The operation.
        group_id: Its group; of a plan over several, their ids with commas between them; empty: none.
        rank: This process's rank in it, at a door that the controller keeps its position; -1: none.
        ranks: How many ranks take part.
        nbytes: The bytes of the collective, as nccl-tests count them; of a kernel inside one, those that it reads.
        calls: How many collectives it is; 0: a piece of one.
        meeting: Of members' own calls, what tells their launches from those of others; empty: a controller's plan.
    """

    op: str = ""
    group_id: str = ""
    rank: int = -1
    ranks: int = 0
    nbytes: int = 0
    calls: int = 0
    meeting: str = ""


NO_LABEL = Label()


class Span(NamedTuple):
    """Something that took time.

    Attributes:
        kind: One of `KINDS`.
        name: What to call it.
        begin_s: When it began, by `time.monotonic`.
        end_s: When it ended.
        thread: The thread, as `threading.get_ident` has it.
        seq: The launch, or its plan's number; 0: none.
        label: What else is known of it.
        error: The name of what it failed with; empty: it did not, as far as is known.
    """

    kind: str
    name: str
    begin_s: float
    end_s: float
    thread: int
    seq: int = 0
    label: Label = NO_LABEL
    error: str = ""


class Place(NamedTuple):
    """What a process knows of a group.

    Attributes:
        name: What the user calls it.
        backend: Its backend.
        rank: This process's rank; -1: it drives the group.
        world_size: How many ranks it has.
    """

    name: str
    backend: str
    rank: int
    world_size: int


class Recorded(NamedTuple):
    """What a ring held when it was read.

    Attributes:
        spans: By the order in which they ended.
        dropped: How many entries were overwritten, as the ring was full.
        threads: Thread -> (its id in the system, its name).
        groups: Group id -> the group.
    """

    spans: tuple[Span, ...]
    dropped: int
    threads: dict[int, tuple[int, str]]
    groups: dict[str, Place]


Entry = tuple[int, str, str, float, float, int, int, int, str, float]
"""Its number; the fields of a `Span`, of which an empty name stands for the op, and a number for the label; of `AGAIN`
when the door was passed, 0: it was not."""


class Ring:
    """The newest entries of one process. Any thread may call it.

    Whoever can't afford a call appends to `entries` itself, has named its thread by `meet`, and takes the number of its
    label once. An entry holds nothing but numbers and strings, so that the garbage collector does not follow it.

    Args:
        limit: How many entries are kept.
        clock: Where the times come from.

    Attributes:
        clock: See above.
        groups: The groups that labels name, as far as they were noted.
        entries: The entries, the oldest first.
        numbers: Gives each its number.
        labelled: The ids of things that come again -> these very things, and the number of their label.
    """

    def __init__(self, limit: int = LIMIT, clock: Callable[[], float] = time.monotonic) -> None:
        self.clock = clock
        self.groups: dict[str, Place] = {}
        self.entries: deque[Entry] = deque(maxlen=limit)
        self.numbers: itertools.count[int] = itertools.count()
        self._threads: dict[int, tuple[int, str]] = {}
        self._labels: dict[Label, int] = {NO_LABEL: 0}
        self.labelled: dict[tuple[int, ...], tuple[object, int]] = {}
        self._lock = threading.Lock()

    def meet(self) -> int:
        """Names this thread for those who read the ring, and gives its number."""
        thread = threading.get_ident()
        if thread not in self._threads:
            self._threads[thread] = threading.get_native_id(), threading.current_thread().name
        return thread

    def label(self, label: Label) -> int:
        """The number of a label."""
        known = self._labels.get(label)
        if known is None:
            with self._lock:
                known = self._labels.setdefault(label, len(self._labels))
        return known

    def label_of(self, make: Callable[[], Label], *things: object) -> int:
        """The number of the label of things that come again, which is made once; see `labelled`.

        Args:
            make: Makes the label.
            *things: What tells it from others; they are kept, so that nothing else gets their ids.
        """
        ids = tuple(map(id, things))
        known = self.labelled.get(ids)
        if known is not None:
            return known[1]
        if len(self.labelled) >= _MOST_LABELLED:
            self.labelled.clear()
        number = self.label(make())
        self.labelled[ids] = things, number
        return number

    def add(
        self,
        kind: str,
        name: str,
        begin_s: float,
        end_s: float,
        seq: int = 0,
        label: Label = NO_LABEL,
        error: str = "",
    ) -> None:
        """Notes a span of this thread."""
        self.put(kind, name, begin_s, end_s, seq, self.label(label), error)

    def put(self, kind: str, name: str, begin_s: float, end_s: float, seq: int, number: int, error: str = "") -> None:
        """Notes a span of this thread, by the number of its label."""
        self.entries.append((next(self.numbers), kind, name, begin_s, end_s, self.meet(), seq, number, error, 0.0))

    def ended(self, kind: str, name: str, begin_s: float, seq: int = 0, label: Label = NO_LABEL) -> None:
        """Notes a span that ends now."""
        self.add(kind, name, begin_s, self.clock(), seq, label)

    def waited(self, name: str, begin_s: float, seq: int = 0) -> None:
        """Notes a wait that ends now, if it was one."""
        now_s = self.clock()
        if now_s - begin_s >= WAIT_S:
            self.add(WAIT, name, begin_s, now_s, seq)

    def since(self, mark: int) -> tuple[int, list[Span]]:
        """The spans that came after a mark, and the mark that comes after them; 0 marks the beginning."""
        entries = [one for one in self.entries.copy() if one[0] >= mark]
        return max((one[0] + 1 for one in entries), default=mark), list(_spans(entries, list(self._labels)))

    def read(self) -> Recorded:
        """All that it holds."""
        entries = self.entries.copy()
        count = max((one[0] + 1 for one in entries), default=0)
        spans = tuple(_spans(entries, list(self._labels)))
        return Recorded(spans, count - len(entries), dict(self._threads), dict(self.groups))


def _spans(entries: Iterable[Entry], labels: Sequence[Label]) -> Iterator[Span]:
    for _, kind, name, begin_s, end_s, thread, seq, label_at, error, agreed_s in entries:
        label = labels[label_at]
        if kind != AGAIN:
            yield Span(kind, name or label.op, begin_s, end_s, thread, seq, label, error)
            continue
        yield Span(PART, name or label.op, begin_s, end_s, thread, seq, label, error)
        yield Span(DOOR, "door", begin_s, agreed_s or end_s, thread, seq, label, "" if agreed_s else error)
        if agreed_s:
            yield Span(KERNEL, label.op, agreed_s, end_s, thread, seq, label, error)


class Tracer:
    """Whether a process records, and for whom. Any thread may call it.

    Attributes:
        ring: What is recorded into; None: nothing is recorded.
        holder: Who has begun it; empty: nobody.
    """

    _current: ClassVar[Tracer | None] = None

    def __init__(self) -> None:
        self.ring: Ring | None = None
        self.holder: str = ""
        self._pid = os.getpid()
        self._lock = threading.Lock()

    @classmethod
    def current(cls) -> Tracer:
        """That of this process; a forked child does not go on with its parent's."""
        found = cls._current
        if found is None or found._pid != os.getpid():
            found = cls._current = cls()
        return found

    def begin(self, holder: str, limit: int = LIMIT) -> Ring | None:
        """Begins to record; None where somebody else does.

        Args:
            holder: Who wants it, for a person to read; the same one begins anew.
            limit: See `Ring`.
        """
        with self._lock:
            if self.ring is not None and self.holder != holder:
                return None
            self.holder, self.ring = holder, Ring(limit)
            return self.ring

    def end(self, holder: str) -> Ring | None:
        """Ends what `begin` began, and gives the ring; None where that was not this one's."""
        with self._lock:
            if self.holder != holder:
                return None
            ring, self.ring, self.holder = self.ring, None, ""
            return ring

    def of(self, holder: str) -> Ring | None:
        """The ring, if it is this one's."""
        with self._lock:
            return self.ring if self.holder == holder else None


# ---------------------------------------------------------------------------------------------- how it travels


def encode_recorded(recorded: Recorded) -> bytes:
    """Packs what a ring held; labels and names, of which there are few, travel once."""
    labels: dict[Label, int] = {}
    names: dict[tuple[str, str, str], int] = {}
    rows = []
    for kind, name, begin_s, end_s, thread, seq, label, error in recorded.spans:
        what = names.setdefault((kind, name, error), len(names))
        rows.append((what, begin_s, end_s, thread, seq, labels.setdefault(label, len(labels))))
    packed: bytes = msgpack.packb(
        (list(names), list(labels), rows, recorded.dropped, list(recorded.threads.items()), recorded.groups)
    )
    return packed


def decode_recorded(payload: bytes | bytearray) -> Recorded:
    """Unpacks what `encode_recorded` made.

    Raises:
        ValueError: It is no such thing.
    """
    try:
        names, labels, rows, dropped, threads, groups = msgpack.unpackb(payload, use_list=False, strict_map_key=False)
        known = [Label(*map(_plain, label)) for label in labels]
        spans = tuple(_span(names[row[0]], row, known[row[5]]) for row in rows)
        told = {int(thread): (int(native), str(name)) for thread, (native, name) in threads}
        places = {str(key): Place(str(n), str(b), int(r), int(size)) for key, (n, b, r, size) in groups.items()}
        return Recorded(spans, int(dropped), told, places)
    except (msgpack.UnpackException, ValueError, TypeError, LookupError, AttributeError, OverflowError) as exc:
        raise ValueError(f"malformed spans: {exc}") from exc


def _plain(value: Any) -> Any:
    if type(value) not in (int, str):
        raise ValueError(f"{a_type(value)} in a label")
    return value


def _span(what: Sequence[Any], row: Sequence[Any], label: Label) -> Span:
    kind, name, error = map(str, what)
    if kind not in KINDS:
        raise ValueError(f"a span of {kind!r}")
    begin_s, end_s = float(row[1]), float(row[2])
    if not 0 <= begin_s <= end_s < float("inf"):
        raise ValueError(f"a span from {begin_s} to {end_s}")
    return Span(kind, name, begin_s, end_s, int(row[3]), int(row[4]), label, error)
