"""Keys that one thread at a time works on."""

from __future__ import annotations

import threading
from concurrent.futures import Future
from time import monotonic

import pytest

from raycollect.core import threads
from raycollect.core.claims import ClaimedError, Claims

WAIT_S = 20.0


def soon() -> float:
    return monotonic() + WAIT_S


def claimed(claims: Claims, key: str, release: threading.Event) -> Future[None]:
    """Has another thread claim a key until it is released; returns when it has."""
    has_begun = threading.Event()

    def hold() -> None:
        with claims.claim(key, soon()):
            has_begun.set()
            assert release.wait(WAIT_S)

    holding = threads.call_in_helper(hold)
    assert has_begun.wait(WAIT_S)
    return holding


def test_other_keys_are_free() -> None:
    claims, release = Claims(), threading.Event()
    holding = claimed(claims, "a", release)
    with claims.claim("b", monotonic()), claims.claim("c", monotonic()):
        assert claims.wait("d", monotonic())
    release.set()
    holding.result(WAIT_S)


def test_a_key_is_free_again_after_the_block_whatever_happens_in_it() -> None:
    claims = Claims()
    for _ in range(2):
        with pytest.raises(ValueError, match="in the block"), claims.claim("a", monotonic()):
            raise ValueError("in the block")


def test_a_claim_that_does_not_end_in_time_is_refused() -> None:
    claims, release = Claims(), threading.Event()
    holding = claimed(claims, "a", release)
    with pytest.raises(ClaimedError) as caught, claims.claim("a", monotonic() + 0.01):
        pass
    assert not caught.value.is_own
    assert not claims.wait("a", monotonic() + 0.01)
    release.set()
    with claims.claim("a", soon()):
        pass
    holding.result(WAIT_S)


def test_a_thread_that_has_a_claim_is_refused_another_one_at_once() -> None:
    """As in a finalizer: nobody else would end the first one."""
    claims = Claims()
    with claims.claim("a", soon()):
        with pytest.raises(ClaimedError) as caught, claims.claim("a", soon()):
            pass
        assert caught.value.is_own
        assert claims.wait("a", soon())
