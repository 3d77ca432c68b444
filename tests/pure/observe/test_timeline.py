"""The ring into which a process records its spans."""

from __future__ import annotations

from typing import Any

import msgpack
import pytest

from raycollect.observe import Label, Ring, TracedGroup, Tracer
from raycollect.observe.trace import (
    AGAIN,
    CHECK,
    KERNEL,
    METHOD,
    PART,
    Recorded,
    decode_recorded,
    encode_recorded,
)
from tests.pure.observe.recorded import LABEL


def test_a_run_of_a_loop_is_one_entry_and_three_spans() -> None:
    ring = Ring()
    thread, label = ring.meet(), ring.label(LABEL)
    ring.entries.append((next(ring.numbers), AGAIN, "", 1.0, 3.0, thread, 7, label, "", 2.0))
    ring.entries.append((next(ring.numbers), AGAIN, "", 4.0, 5.0, thread, 8, label, "PlanAbortedError", 0.0))
    spans = ring.read().spans
    assert [(span.kind, span.name, span.begin_s, span.end_s, span.error) for span in spans] == [
        (PART, "allreduce", 1.0, 3.0, ""),
        (CHECK, "consistency check", 1.0, 2.0, ""),
        (KERNEL, "allreduce", 2.0, 3.0, ""),
        (PART, "allreduce", 4.0, 5.0, "PlanAbortedError"),
        (CHECK, "consistency check", 4.0, 5.0, "PlanAbortedError"),
    ]
    assert {span.label for span in spans} == {LABEL}


def test_what_comes_again_is_labelled_once_and_what_is_gone_gives_no_other_its_label() -> None:
    ring = Ring()
    numbers = {ring.label_of(lambda at=at: Label(op=f"op{at}"), object()) for at in range(3000)}  # type: ignore[misc]
    assert len(numbers) == 3000
    assert len(ring.labelled) <= 1024
    assert all(id(thing) == key for key, (thing, *_) in ring.labelled.items())
    first, other = object(), object()
    number = ring.label_of(lambda: LABEL, first, other)
    assert ring.label_of(lambda: pytest.fail("it is known"), first, other) == number
    assert ring.label_of(lambda: Label(op="another"), other, first) != number


def test_short_waits_are_none() -> None:
    times = iter([1.0, 2.0, 2.000_01])
    ring = Ring(clock=lambda: next(times))
    ring.waited("a", 0.5)
    ring.waited("b", 2.0 - 1e-6)
    ring.waited("c", 2.0)
    assert [span.name for span in ring.read().spans] == ["a"]


def test_one_records_at_a_time() -> None:
    tracer = Tracer()
    ring = tracer.begin("one")
    assert ring is not None
    assert tracer.begin("two") is None
    assert (tracer.end("two"), tracer.of("two"), tracer.of("one")) == (None, None, ring)
    assert tracer.begin("one") is not ring
    assert tracer.end("one") is not None
    assert (tracer.ring, tracer.holder) == (None, "")
    assert tracer.begin("two") is not None


def recorded() -> Recorded:
    ring = Ring(limit=6)
    ring.groups["g1"] = TracedGroup("default", "shm", 1, 2)
    for at in range(8):
        ring.add(METHOD if at % 2 else KERNEL, f"m{at}", at, at + 0.25, at, LABEL if at % 3 else Label(), "")
    return ring.read()


def test_what_a_ring_held_survives_the_wire() -> None:
    assert decode_recorded(encode_recorded(recorded())) == recorded()


@pytest.mark.parametrize(
    "change",
    [
        lambda entry, doc: doc[:3],
        lambda entry, doc: [[[*entry[:1], "nonsense", *entry[2:]]], *doc[1:]],
        lambda entry, doc: [[[*entry[:3], 2.0, 1.0, *entry[5:]]], *doc[1:]],
        lambda entry, doc: [[[*entry[:3], float("nan"), *entry[4:]]], *doc[1:]],
        lambda entry, doc: [[[*entry[:4], float("inf"), *entry[5:]]], *doc[1:]],
        lambda entry, doc: [[[*entry[:9], 99.0]], *doc[1:]],
        lambda entry, doc: [[[*entry[:7], 99, *entry[8:]]], *doc[1:]],
        lambda entry, doc: [[[*entry[:7], -1, *entry[8:]]], *doc[1:]],
        lambda entry, doc: [[entry[:9]], *doc[1:]],
        lambda entry, doc: [[7], *doc[1:]],
        lambda entry, doc: [doc[0], [["op", [], 1, 2, 3, 4, ""]] * 9, *doc[2:]],
        lambda entry, doc: [*doc[:3], [[1, 2, 3]], doc[4]],
        lambda entry, doc: [*doc[:4], {"g": ["x"]}],
        lambda entry, doc: [*doc[:4], 7],
        lambda entry, doc: 7,
    ],
)
def test_spans_that_make_no_sense_are_refused(change: Any) -> None:
    document = msgpack.unpackb(encode_recorded(recorded()), strict_map_key=False)
    with pytest.raises(ValueError, match="malformed spans"):
        decode_recorded(msgpack.packb(change(document[0][-1], document)))
