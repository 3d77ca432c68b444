"""The captured steps of a participant: the order of their runs and what brings them, in threads and without Ray."""

from __future__ import annotations

import types
from typing import Any

import pytest

from raycollect.channel.messages import BeginRun
from raycollect.core.model import Segment
from raycollect.engine.value_codec import pack_values
from raycollect.errors import CaptureError
from raycollect.member import captured_steps
from raycollect.member.captured_steps import CapturedSteps, open_doorbell
from tests.pure.member.step_bench import FakePost, MakeBench, bench
from tests.pure.teams import CAPTURE

__all__ = ["bench"]  # fixtures


@pytest.mark.parametrize("rung_first", [True, False])
def test_oversized_arguments_use_the_channel(bench: MakeBench, rung_first: bool) -> None:
    """The bell is rung before the message is sent; the thread may see them in any order."""
    one = bench(post=FakePost())
    assert one.post is not None
    if rung_first:
        number = one.post.ring(1, 0, None)
        one.run(1, 0, "long")
    else:
        with one.post.changed:  # the thread sees both at once
            number = one.post.ring(1, 0, None)
            payload = pack_values(["long"])
            one.captured._arrived.append(BeginRun(capture=CAPTURE, seq=1, predecessor=0, payload=payload, after=b""))
            with one.captured._changed:
                one.captured._changed.notify_all()
    assert one.answered(number) == ("long",)


def test_results_too_long_for_the_bell_go_by_the_channel(bench: MakeBench) -> None:
    one = bench(post=FakePost(inline=8))
    assert one.post is not None
    one.post.ring(1, 0, pack_values(["x" * 30]))
    one.heard(1)
    assert one.ran == {1: ("x" * 30,)}
    assert one.answered(one.post.ring(2, 1, pack_values([2]))) == (2,)


def test_a_run_that_was_not_rung_for_is_done_all_the_same(bench: MakeBench) -> None:
    one = bench(post=FakePost())
    assert one.post is not None
    assert one.answered(one.post.ring(1, 0, pack_values([1]))) == (1,)
    one.run(2, 1, "by the channel")
    one.heard(2)
    assert one.ran == {2: ("by the channel",)}
    assert one.answered(one.post.ring(3, 2, pack_values([3]))) == (3,)


def test_a_doorbell_out_of_reach_is_none() -> None:
    assert open_doorbell(None, 0, keeps_core=True) is None
    assert open_doorbell(Segment(1 << 22, 3, b"t" * 16, 4096), 0, keeps_core=True) is None


class Fake:
    """A captured step that only notes what is done to it."""

    def __init__(self) -> None:
        self.closed: list[str] = []
        self.woken: list[int] = []
        self.runner = types.SimpleNamespace(abort=self.woken.append)

    def close(self, reason: str) -> None:
        self.closed.append(reason)

    def exchange(self, seq: int) -> Any:
        return self if seq == 3 else None


def _made(table: CapturedSteps, capture: bytes) -> Any:
    return table.add(capture, Fake)  # type: ignore[arg-type,return-value]


def test_table_finds_live_and_recently_closed_steps() -> None:
    table = CapturedSteps()
    one, other = _made(table, b"1"), _made(table, b"2")
    assert table.find(b"1") is one
    assert table.find(b"3") is None
    table.wake(5)
    assert one.woken == other.woken == [5]
    assert table.exchange(3) in (one, other)
    assert table.exchange(4) is None
    with pytest.raises(CaptureError, match="before"):
        _made(table, b"1")
    table.forget(b"1", "forgotten")
    table.forget(b"1", "again")
    assert one.closed == ["forgotten"]
    assert table.find(b"1") is one, "what is on its way to it"
    with pytest.raises(CaptureError, match="closed while it was captured"):
        _made(table, b"1")
    table.close("over")
    assert other.closed == ["over"]
    with pytest.raises(CaptureError, match="closed"):
        _made(table, b"9")


def test_a_step_that_was_closed_before_it_came_is_not_taken_in() -> None:
    table = CapturedSteps()
    table.forget(b"1", "timed out")
    with pytest.raises(CaptureError):
        _made(table, b"1")
    assert table.find(b"1") is None


def test_few_of_the_closed_are_remembered() -> None:
    table = CapturedSteps()
    made = [_made(table, bytes([at // 256, at % 256])) for at in range(captured_steps.LATE + 10)]
    for at in range(len(made)):
        table.forget(bytes([at // 256, at % 256]), "closed")
    found = [table.find(bytes([at // 256, at % 256])) for at in range(len(made))]
    assert found == [None] * 10 + made[10:]
