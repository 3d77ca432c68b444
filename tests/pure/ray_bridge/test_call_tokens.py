"""Tokens that a caller lends, on refs that Ray does not know: `tests/ray/test_lent_tokens.py` has the real ones."""

from __future__ import annotations

import weakref

import msgpack
import numpy as np
import pytest
import ray
from ray import _raylet
from ray._private.worker import global_worker

from raycollect.core import threads
from raycollect.core.model import Key
from raycollect.ray_bridge import call_tokens
from raycollect.ray_bridge.call_tokens import CallTokens, LentToken


class Ref:
    """In place of a ref: calls back when the test says that nobody holds it."""

    def __init__(self, name: int = 0) -> None:
        self.name = name

    def binary(self) -> bytes:
        return self.name.to_bytes(28, "big")


class Actor:
    """In place of a handle."""

    def __init__(self) -> None:
        self._ray_weak_ref = False
        self._ray_method_signatures = {"make": []}


class Caller:
    """Makes calls of one actor, and notes what is told to it."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.callbacks: dict[int, object] = {}
        self.told: list[list[Key]] = []
        self.due: list[object] = []
        self.ended = 0
        monkeypatch.setattr(ray, "wait", lambda refs, **_: (refs, []))
        monkeypatch.setattr(global_worker, "core_worker", self, raising=False)
        methods = frozenset({"make"})
        self.tokens = CallTokens(Actor(), b"owner", methods, self._order, self.told.append, self._soon)

    def _soon(self, call: object) -> bool:
        self.due.append(call)
        return True

    def _order(self, count: int) -> list[Ref]:
        return [Ref() for _ in range(count)]

    def add_object_out_of_scope_callback(self, ref: Ref, callback: object) -> None:
        """In place of the core worker's."""
        self.callbacks[id(ref)] = callback

    def serialize_object_ref(self, ref: Ref) -> tuple[object, bytes, bytes]:
        """In place of the core worker's."""
        return ref, b"owner", b""

    def call(self, number: int, method: str = "make", **options: object) -> object:
        """What comes to the method as its first argument; None where nothing is lent."""
        given = {"args": [], "kwargs": {}, "num_returns": 1, "tensor_transport": None, **options}
        lent = self.tokens.lend(method, given)
        if lent is None:
            assert given["args"] == []
            return None
        handle, submitted = lent
        assert handle._ray_weak_ref
        assert len(handle._ray_method_signatures["make"]) == 1
        submitted(Ref(number))
        return given["args"][0]

    def nobody_holds(self, lent: object) -> None:
        self.callbacks[id(lent.token)](b"")

    def end(self) -> None:
        def ended() -> None:
            self.ended += 1

        self.tokens.end(ended)


@pytest.fixture
def caller(monkeypatch: pytest.MonkeyPatch) -> Caller:
    return Caller(monkeypatch)


def key(number: int) -> Key:
    return Key(Ref(number).binary())


def test_the_keys_that_nobody_holds_are_told_together(caller):
    lent = [caller.call(number) for number in range(3)]
    assert all(msgpack.unpackb(one.data.partition(b" token ")[2])[0] == b"owner" for one in lent)
    assert len({id(one.token) for one in lent}) == 3
    for one in lent[:2]:
        caller.nobody_holds(one)
    assert len(caller.due) == 1
    caller.due.pop()()
    assert caller.told == [[key(0), key(1)]]
    caller.nobody_holds(lent[2])
    assert len(caller.due) == 1, "it comes a second time"


@pytest.mark.parametrize("other", [{"method": "other"}, {"num_returns": 2}, {"tensor_transport": "gloo"}])
def test_other_calls_get_no_token(caller, other):
    assert caller.call(1, **other) is None


@pytest.mark.parametrize("missing", ["RawSerializedObject", "Pickle5SerializedObject"])
def test_where_ray_offers_no_way_nothing_is_lent(monkeypatch, missing):
    monkeypatch.delattr(_raylet, missing)
    assert Caller(monkeypatch).call(1) is None


@pytest.mark.parametrize("value", [b"", b"\x93", b"bytes of the caller's", [b"a list"], np.zeros(3), None])
def test_an_argument_of_the_caller_is_no_token(value):
    assert LentToken.read(value) is None


def test_the_end_is_told_once_nobody_holds_a_value(caller):
    lent = caller.call(1)
    caller.end()
    assert caller.call(2) is None
    assert caller.ended == 0
    caller.nobody_holds(lent)
    caller.due.pop()()
    assert caller.told == [[key(1)]]
    assert caller.ended == 1


def test_keys_that_could_not_be_told_are_told_later(caller):
    """As where no thread can be started for it."""
    lent = [caller.call(number) for number in range(2)]
    tell, failing = caller.tokens._tell, [RuntimeError("can't start new thread"), ConnectionError()]

    def fails(keys):
        if failing:
            raise failing.pop(0)
        tell(keys)

    caller.tokens._tell = fails
    for one in lent:
        caller.nobody_holds(one)
    caller.end()
    for _ in range(2):
        assert caller.ended == 0
        caller.due.pop()()
    assert caller.told == [[key(0), key(1)]]
    assert caller.ended == 1


def test_a_finalizer_tells_while_others_are_told(caller):
    """Where nobody makes calls in a moment any more, the thread that lets go of a value does it."""
    lent = [caller.call(number) for number in range(2)]
    caller.tokens._soon = lambda call: False
    tell = caller.tokens._tell

    def tells(keys):
        if not caller.told:
            tell(keys)
            caller.nobody_holds(lent[1])
        else:
            tell(keys)

    caller.tokens._tell = tells
    assert threads.has_ended(threads.call_in_helper(caller.nobody_holds, lent[0]), 20.0)
    assert caller.told == [[key(0)], [key(1)]]


def test_what_was_not_lent_is_let_go_of_where_the_user_is(caller):
    """A thread that lets go of a ref while Ray is being shut down ends the process."""
    caller.call(1)
    known = [weakref.ref(argument.token) for argument, _ in caller.tokens._ready]
    assert known
    caller.end()
    assert all(one() is not None for one in known)
    call_tokens.let_go()
    assert all(one() is None for one in known)


@pytest.mark.parametrize("ends_while", ["they are ordered", "they are taken in"])
def test_tokens_that_come_as_another_thread_ends_it_are_let_go_of_too(monkeypatch, caller, ends_while):
    """Nobody else would: Ray holds the callback of each, which holds them all."""

    def ended(result):
        if caller.tokens._order is not None:
            caller.end()
            call_tokens.let_go()
        return result

    if ends_while == "they are ordered":
        order = caller.tokens._order
        caller.tokens._order = lambda count: ended(order(count))
    else:
        caller.add_object_out_of_scope_callback = lambda ref, callback: ended(None)
    assert caller.call(1) is None
    assert caller.tokens._ready == []
    assert caller.tokens._coming == []
