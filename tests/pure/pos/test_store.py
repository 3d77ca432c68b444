"""The Python Object Store: a table of states per key, and waits for a value."""

from __future__ import annotations

import threading
import weakref
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from raycollect.channel.messages import StoreStatistics
from raycollect.core.model import TENSOR, Key, task_key
from raycollect.errors import StoreFullError
from raycollect.pos import Absence, Container, State, Store
from raycollect.pos.store import _NEXT
from tests.pure.pos.watched_stores import Owner, threads, watched_store
from tests.pure.watched import WAIT_S

__all__ = ["threads"]  # a fixture


def _task(number: int) -> bytes:
    return number.to_bytes(24, "little")


def _key(number: int, index: int = 1) -> Key:
    return task_key(_task(number), index)


def _container(value: Any = None) -> Container:
    return Container(TENSOR, (value,), value)


def _state(store: Store, key: Key) -> State:
    value = store.look(key)
    return State.HELD if isinstance(value, Container) else value.state


# ---------------------------------------------------------------------------------------------- entries


def test_freeing_gives_back_the_value() -> None:
    store, owner = Store(), Owner()
    store.put(_key(1), _container(owner))
    gone = weakref.ref(owner)
    del owner
    assert gone() is not None
    store.free([_key(1)])
    assert gone() is None


def test_freeing_counts_what_was_held_once() -> None:
    store = Store()
    for number in range(3):
        store.put(_key(number), _container())
    assert store.free([_key(0), _key(0), _key(1), _key(9)]) == 2
    assert store.statistics() == StoreStatistics(held=1, dirty=0, freed=2)


def test_a_full_store_refuses_until_something_is_freed() -> None:
    store = Store(limit=2)
    store.put(_key(1), _container())
    store.put(_key(2), _container())
    with pytest.raises(StoreFullError, match="holds 2 tensors"):
        store.put(_key(3), _container())
    assert _state(store, _key(3)) is State.ABSENT
    assert store.put(_key(2), _container()) is True, "what is held already takes no more room"
    store.free([_key(1)])
    assert store.put(_key(3), _container()) is True


def test_only_so_many_absences_are_remembered_the_latest() -> None:
    store = Store(memory=10)
    for number in range(1000):
        store.fail(_task(number), "no")
        assert len(store._absent) <= 10
    remembered = [number for number in range(1000) if _state(store, _key(number)) is State.FAILED]
    assert remembered == list(range(990, 1000))


EVENTS = ("put", "fail", "pass", "free")


class Model:
    """What a store should say of one key: the table of states, and which event set the state."""

    def __init__(self) -> None:
        self.state = State.ABSENT
        self.value: Any = Absence(State.ABSENT)

    def on(self, event: str, detail: Any) -> None:
        after = _NEXT[self.state, event]
        if after is not self.state or (event == "fail" and after is State.FAILED):
            self.value = {"put": detail, "free": Absence(State.FREED)}.get(event, Absence(after, str(detail)))
        elif event == "pass" and after is State.BY_VALUE:
            self.value = Absence(after, str(detail))
        self.state = after


def _apply(store: Store, event: str, number: int, detail: Any) -> None:
    if event == "put":
        store.put(_key(number), detail)
    elif event == "fail":
        store.fail(_task(number), str(detail))
    elif event == "pass":
        store.pass_by(_task(number), str(detail))
    else:
        store.free([_key(number)])


@given(st.lists(st.tuples(st.sampled_from(EVENTS), st.integers(1, 3)), max_size=25))
def test_every_story_of_a_key_follows_the_table(story: list[tuple[str, int]]) -> None:
    store, models = Store(), {number: Model() for number in (1, 2, 3)}
    freed = 0
    for at, (event, number) in enumerate(story):
        detail: Any = _container(at) if event == "put" else f"event {at}"
        freed += event == "free" and models[number].state is State.HELD
        models[number].on(event, detail)
        _apply(store, event, number, detail)
        for other, model in models.items():
            assert store.look(_key(other)) == model.value
        held = sum(model.state is State.HELD for model in models.values())
        assert store.statistics() == StoreStatistics(held=held, dirty=0, freed=freed)


# ---------------------------------------------------------------------------------------------- waiting


def _never() -> bool:
    return False


@pytest.mark.parametrize("event", EVENTS)
def test_whatever_ends_the_method_ends_the_wait(event: str, threads: ThreadPoolExecutor) -> None:
    store, watched = watched_store()
    waiter = threads.submit(store.wait, _key(1), _never)
    assert watched.someone_waits()
    _apply(store, "put", 2, _container())  # something else
    assert watched.someone_waits(), "it looked, and waits again"
    detail = _container("late") if event == "put" else "late"
    _apply(store, event, 1, detail)
    assert waiter.result(WAIT_S) == store.look(_key(1))
    assert _state(store, _key(1)) is _NEXT[State.ABSENT, event]


def test_a_wait_is_given_up_when_woken(threads: ThreadPoolExecutor) -> None:
    store, watched = watched_store()
    aborted = threading.Event()
    waiter = threads.submit(store.wait, _key(1), aborted.is_set)
    assert watched.someone_waits()
    store.wake()
    assert watched.someone_waits(), "no reason yet to give up"
    aborted.set()
    store.wake()
    assert waiter.result(WAIT_S) == Absence(State.ABSENT)


class _Counted(tuple[int, int]):
    looks = 0

    def __getitem__(self, at: Any) -> Any:
        _Counted.looks += 1
        return super().__getitem__(at)


_RANGES = st.lists(st.tuples(st.integers(0, 200), st.integers(0, 6)).map(lambda pair: (pair[0], pair[0] + pair[1])))


@given(_RANGES, _RANGES)
@settings(max_examples=200)
def test_many_ranges_overlap_as_each_two_of_them_do(dirty: list[tuple[int, int]], spans: list[tuple[int, int]]) -> None:
    store, owner = Store(), Owner()
    store.mark_dirty(dirty, [owner] * len(dirty))
    assert store.is_dirty(spans) == any(max(a[0], b[0]) < min(a[1], b[1]) for a in spans for b in dirty)


def test_claims_of_many_ranges_are_not_compared_each_with_each() -> None:
    store = Store()
    read = [(10 * at, 10 * at + 4) for at in range(500)]
    _Counted.looks = 0
    with store.reading(read), store.writing([_Counted((10 * at + 5, 10 * at + 9)) for at in range(500)]):
        assert _Counted.looks < 10 * 500
