"""The Python Object Store: claims and dirt per memory range."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from raycollect.errors import CollectiveTimeoutError, PlanAbortedError
from raycollect.pos import Range, Store
from tests.pure.pos.watched_stores import Owner, threads, watched_store
from tests.pure.watched import WAIT_S

__all__ = ["threads"]  # a fixture


HERE: list[Range] = [(100, 200)]
BESIDE: list[Range] = [(0, 100), (200, 300), (150, 150)]


@pytest.mark.parametrize(
    ("first", "second", "ranges"),
    [
        ("reading", "reading", HERE),
        ("writing", "reading", BESIDE),
        ("reading", "writing", BESIDE),
        ("writing", "writing", BESIDE),
        ("writing", "writing", []),
    ],
)
def test_other_claims_do_not_wait(first: str, second: str, ranges: list[Range]) -> None:
    store, watched = watched_store()
    with getattr(store, first)(HERE), getattr(store, second)(ranges):
        pass
    assert watched.nobody_waited


def test_a_claim_ends_with_an_exception() -> None:
    store, watched = watched_store()
    with pytest.raises(ZeroDivisionError), store.writing(HERE):
        _ = 1 / 0
    with store.writing(HERE):
        pass
    assert watched.nobody_waited


def test_equal_claims_end_one_by_one(threads: ThreadPoolExecutor) -> None:
    store, watched = watched_store()
    first, other = store.reading(list(HERE)), store.reading(list(HERE))
    first.__enter__()
    other.__enter__()
    first.__exit__(None, None, None)

    def write() -> str:
        with store.writing(HERE):
            return "written"

    writer = threads.submit(write)
    assert watched.someone_waits(), "the second reader is still at it"
    other.__exit__(None, None, None)
    assert writer.result(WAIT_S) == "written"


def test_dirt_goes_with_the_memory_it_was_in() -> None:
    store, owner, other = Store(), Owner(), Owner()
    store.mark_dirty([(0, 10), (20, 30)], [owner, other])
    del owner
    assert not store.is_dirty([(0, 10)]), "the address may belong to something new"
    assert store.is_dirty([(20, 30)])
    assert store.statistics().dirty == 1


def test_an_owner_that_cannot_be_asked_keeps_its_dirt() -> None:
    store = Store()
    store.mark_dirty([(0, 10)], [bytearray(10)])  # can't be weakly referenced
    assert store.is_dirty([(0, 1)])
    store.mark_written([(0, 10)])
    assert not store.is_dirty([(0, 1)])


_RANGES = st.tuples(st.integers(0, 30), st.integers(0, 12)).map(lambda pair: (pair[0], pair[0] + pair[1]))


@given(st.lists(st.tuples(st.sampled_from(["dirty", "written"]), _RANGES), max_size=20), _RANGES)
def test_no_byte_that_is_half_written_passes_as_clean(story: list[tuple[str, Range]], span: Range) -> None:
    """Dirt is kept by whole ranges: more may count as dirty than is, never less."""
    store, owner, dirty = Store(), Owner(), set[int]()
    for event, (lo, hi) in story:
        if event == "dirty":
            store.mark_dirty([(lo, hi)], [owner])
            dirty |= set(range(lo, hi))
        else:
            store.mark_written([(lo, hi)])
            dirty -= set(range(lo, hi))
    if dirty & set(range(*span)):
        assert store.is_dirty([span])
    store.mark_written([(0, 100)])
    assert not store.is_dirty([span])


def test_readers_in_turn_do_not_hold_a_plan_off(threads: ThreadPoolExecutor) -> None:
    store, watched = watched_store()
    span: list[Range] = [(0, 10)]
    order = []

    def claim(name: str, context: Any) -> None:
        with context:
            order.append(name)

    with store.reading(span):
        writer = threads.submit(claim, "plan", store.writing(span))
        assert watched.someone_waits()
        reader = threads.submit(claim, "reader", store.reading(span))
        assert watched.someone_waits()
        assert order == []
    writer.result(WAIT_S)
    reader.result(WAIT_S)
    assert order == ["plan", "reader"]


def test_a_plan_gives_up_waiting_for_readers_and_nothing_of_it_stays(threads: ThreadPoolExecutor) -> None:
    store, watched = watched_store()
    span: list[Range] = [(0, 10)]
    aborted: list[str] = []

    def write() -> None:
        with store.writing(span, lambda: aborted[0] if aborted else None):
            raise AssertionError("somebody reads it")

    with store.reading(span):
        writer = threads.submit(write)
        assert watched.someone_waits()
        aborted.append("rank 1 died")
        store.wake()
        with pytest.raises(PlanAbortedError, match="rank 1 died"):
            writer.result(WAIT_S)
        with store.reading(span):  # it is not held off by a plan that has gone
            pass
    with store.writing(span):
        pass


def test_a_plan_waits_for_readers_as_long_as_its_calls_may() -> None:
    store, span = Store(), [(0, 10)]
    with store.reading(span), pytest.raises(CollectiveTimeoutError) as late, store.writing(span, limit_s=0.01):
        raise AssertionError("somebody reads it")
    assert late.value.timeout_s == 0.01
    with store.writing(span):
        pass


def test_a_reader_waits_for_a_plan_as_long_as_it_may() -> None:
    store, span = Store(), [(0, 10)]
    with store.writing(span), pytest.raises(CollectiveTimeoutError) as late, store.reading(span, limit_s=0.01):
        raise AssertionError("somebody writes it")
    assert late.value.timeout_s == 0.01
    gone = pytest.raises(PlanAbortedError, match="the client has left")
    with store.writing(span), gone, store.reading(span, lambda: "the client has left"):
        raise AssertionError("somebody writes it")
    with store.writing(span):
        pass
