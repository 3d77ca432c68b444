"""The spans of a timeline in this process, in a ring of fixed size.

Timed code asks its `Tracer` for the ring; if that is None, nothing is recorded. An entry is a tuple of numbers and
strings, never a tensor. Entries become `Span` values only when the ring is read.
"""

from __future__ import annotations

import itertools
import threading
import time
from collections import deque
from collections.abc import Callable
from typing import NamedTuple

from raycollect.core.codec import Codec
from raycollect.core.model import GroupSpec
from raycollect.errors import ProtocolError

PLAN, RUN, PART, WAIT, CHECK = "plan", "run", "part", "wait", "check"
COLLECTIVE, KERNEL, STAGING, METHOD, CALL = "collective", "kernel", "staging", "method", "call"
KINDS = (PLAN, RUN, PART, WAIT, CHECK, COLLECTIVE, KERNEL, STAGING, METHOD, CALL)
"""The kinds of spans; see docs/timeline.md."""

AGAIN = "again"
"""In the ring only: a part, its agreement and its kernel in one entry, for loops whose runs take some 100 us."""

CHECK_NAME = "consistency check"

_MOST_LABELLED = 1024
"""How many labels of recurring objects are cached."""

LIMIT = 65_536
"""How many entries a ring keeps by default: 10 MB of memory at most."""
MOST = 500_000
"""The most entries of a ring: so many fit through a control connection before its deadline."""

WAIT_S = 20e-6
"""Shorter waits are not recorded."""


class Label(NamedTuple):
    """The properties of a piece of work besides its times."""

    op: str = ""
    group_id: str = ""  # its group; for a plan over several groups, their ids separated by commas; empty: none
    rank: int = -1  # this process's rank in it, or its position if ranks agree through the controller; -1: none
    ranks: int = 0
    # The bytes of the collective, as nccl-tests count them; for a kernel inside one, the bytes that it reads
    nbytes: int = 0
    calls: int = 0  # the number of collectives; 0: a piece of one
    meeting: str = ""  # distinguishes the launches of members' own calls; empty: a controller's plan


NO_LABEL = Label()


class Span(NamedTuple):
    """A piece of work with its times."""

    kind: str  # one of `KINDS`
    name: str
    begin_s: float
    end_s: float
    thread: int
    seq: int = 0  # the launch, or its plan's number; 0: none
    label: Label = NO_LABEL  # its other properties
    error: str = ""
    group: str = ""  # the name of the label's group, and the backend; set in whole timelines
    backend: str = ""


class TracedGroup(NamedTuple):
    """A group of a process; rank -1: the process drives the group."""

    name: str
    backend: str
    rank: int
    world_size: int

    @classmethod
    def of(cls, spec: GroupSpec, rank: int = -1) -> TracedGroup:
        """Returns the description of a group."""
        return cls(spec.name, spec.backend, rank, spec.world_size)


Entry = tuple[int, str, str, float, float, int, int, int, str, float]
"""Its number; the fields of a `Span`, with an empty name for the op, and a number for the label; for `AGAIN` the end of
the agreement, or 0."""


class Recorded(NamedTuple):
    """The contents of a ring when it was read."""

    entries: tuple[Entry, ...]  # in the order in which they ended
    labels: tuple[Label, ...]  # by their numbers
    dropped: int  # how many entries were overwritten because the ring was full
    threads: dict[int, str]  # their names
    groups: dict[str, TracedGroup]  # group id -> the group

    @property
    def spans(self) -> tuple[Span, ...]:
        """The spans; an entry may stand for three spans."""
        spans = list[Span]()
        for _, kind, name, begin_s, end_s, thread, seq, number, error, agreed_s in self.entries:
            label = self.labels[number]
            part = Span(PART if kind == AGAIN else kind, name or label.op, begin_s, end_s, thread, seq, label, error)
            spans.append(part)
            if kind == AGAIN and not agreed_s:
                spans.append(part._replace(kind=CHECK, name=CHECK_NAME))
            elif kind == AGAIN:
                spans.append(part._replace(kind=CHECK, name=CHECK_NAME, end_s=agreed_s, error=""))
                spans.append(part._replace(kind=KERNEL, name=label.op, begin_s=agreed_s))
        return tuple(spans)


class Ring:
    """The newest entries of one process. Any thread may call it.

    Hot code appends to `entries` directly, after it has registered its thread by `meet` and taken the number of its
    label once. Entries hold only numbers and strings, so that the garbage collector does not track them.
    """

    def __init__(self, limit: int = LIMIT, clock: Callable[[], float] = time.monotonic) -> None:
        self.clock = clock
        self.groups: dict[str, TracedGroup] = {}  # the groups of labels, as far as they were noted
        self.entries: deque[Entry] = deque(maxlen=limit)  # the oldest first
        self.numbers: itertools.count[int] = itertools.count()
        self._threads: dict[int, str] = {}
        self._labels: dict[Label, int] = {NO_LABEL: 0}
        # The id of a recurring object -> the object, the others that its label depends on, the number of the label
        self.labelled: dict[int, tuple[object, tuple[object, ...], int]] = {}
        self._lock = threading.Lock()

    def meet(self) -> int:
        """Registers the name of this thread for readers of the ring, and returns its number."""
        thread = threading.get_ident()
        if thread not in self._threads:
            self._threads[thread] = threading.current_thread().name
        return thread

    def label(self, label: Label) -> int:
        """Returns the number of a label."""
        number = self._labels.get(label)
        if number is None:
            with self._lock:
                number = self._labels.setdefault(label, len(self._labels))
        return number

    def label_of(self, make: Callable[[], Label], thing: object, *others: object) -> int:
        """Returns the number of the label of a recurring object; holds the object, so that its id stays unique.

        The label may depend on other objects, too. `make` is called for a new object, or if the others have changed.
        """
        labelled = self.labelled.get(id(thing))
        if labelled is not None and labelled[1] == others:
            return labelled[2]
        if len(self.labelled) >= _MOST_LABELLED:
            self.labelled.clear()
        number = self.label(make())
        self.labelled[id(thing)] = thing, others, number
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
        """Adds a span of this thread."""
        self.put(kind, name, begin_s, end_s, seq, self.label(label), error)

    def put(self, kind: str, name: str, begin_s: float, end_s: float, seq: int, number: int, error: str = "") -> None:
        """Adds a span of this thread, by the number of its label."""
        self.entries.append((next(self.numbers), kind, name, begin_s, end_s, self.meet(), seq, number, error, 0.0))

    def ended(self, kind: str, name: str, begin_s: float, seq: int = 0) -> None:
        """Adds a span that ends now."""
        self.add(kind, name, begin_s, self.clock(), seq)

    def waited(self, name: str, begin_s: float, seq: int = 0) -> None:
        """Adds a wait that ends now, if it was long enough."""
        now_s = self.clock()
        if now_s - begin_s >= WAIT_S:
            self.add(WAIT, name, begin_s, now_s, seq)

    def read(self, after: int = -1) -> Recorded:
        """Returns the contents; of the entries those with a number greater than `after`."""
        entries = self.entries.copy()
        is_full = len(entries) == entries.maxlen  # else a number without an entry belongs to a pending one
        dropped = max(entry[0] for entry in entries) + 1 - len(entries) if is_full else 0
        newer = tuple(entry for entry in entries if entry[0] > after)
        return Recorded(newer, tuple(self._labels), dropped, dict(self._threads), dict(self.groups))


class Tracer:
    """The current recording of a process. Any thread may call it."""

    def __init__(self) -> None:
        self.ring: Ring | None = None  # the ring; None: nothing is recorded
        self.holder: str = ""  # the holder of the recording; empty: none
        self._lock = threading.Lock()

    def begin(self, holder: str, limit: int = LIMIT) -> Ring | None:
        """Begins to record for `holder`, also again; returns None if another holder records."""
        with self._lock:
            if self.ring is not None and self.holder != holder:
                return None
            self.holder, self.ring = holder, Ring(limit)
            return self.ring

    def end(self, holder: str) -> Ring | None:
        """Ends a recording and returns its ring; None if another holder records."""
        with self._lock:
            if self.holder != holder:
                return None
            ring, self.ring, self.holder = self.ring, None, ""
            return ring

    def of(self, holder: str) -> Ring | None:
        """Returns the ring if `holder` records."""
        with self._lock:
            return self.ring if self.holder == holder else None


_RECORDED = Codec[Recorded](Recorded, "spans")

encode_recorded: Callable[[Recorded], bytes] = _RECORDED.encode
"""Packs the contents of a ring."""


def decode_recorded(payload: bytes | bytearray) -> Recorded:
    """Unpacks the output of `encode_recorded`; raises ValueError if it is malformed."""
    try:
        recorded = _RECORDED.decode(payload)
    except ProtocolError as exc:
        raise ValueError(exc.detail) from exc
    for _, kind, _, begin_s, end_s, _, _, label, _, agreed_s in recorded.entries:
        if not 0 <= begin_s <= (agreed_s or end_s) <= end_s < float("inf"):
            raise ValueError(f"malformed spans: from {begin_s} to {end_s}")
        if (kind != AGAIN and kind not in KINDS) or not 0 <= label < len(recorded.labels):
            raise ValueError(f"malformed spans: of kind {kind[:80]!r}, with label {label}")
    return recorded
