"""What notebooks show: nothing of a user's is taken for HTML, it stays short, and showing it never fails."""

from __future__ import annotations

import random
import re
from concurrent.futures import Future
from types import SimpleNamespace

import numpy as np
import pytest

from raycollect.captured.step import CapturedRun
from raycollect.core import html
from raycollect.core.deadline import NEVER
from raycollect.core.model import TENSOR, Address, Key, Structure, TensorInfo
from raycollect.driver.group_status import GroupStatus
from raycollect.driver.work import Work
from raycollect.errors import KernelError, PlanAbortedError
from raycollect.member.work import MemberWork
from raycollect.pos.handle import Handle
from tests.pure.driver.shown_html import progress, read, status

HOSTILE = (
    "<script>alert(1)</script>",
    "</td></tr></table><b>",
    "\"' onmouseover=alert(1) x='",
    "a&lt;b & <&>",
    "</summary></details></pre>",
    "\ud800 alone",
    "nul \x00 \x1b[31m",
    "long " * 1000,
)


def plain(words):
    """How a text of at most so many characters reads."""
    words = words if len(words) <= html.MOST_CELL else f"{words[: html.MOST_CELL - 3]}..."
    return words.encode("utf-8", "replace").decode()


@pytest.mark.parametrize("words", HOSTILE)
def test_whatever_is_shown_of_users_is_escaped_and_short(words):
    members = (
        status(0, plans=(7, 9), steps=("in the consistency check", "")),
        status(1, actor=words, doing=words, stack=(words, "t.py:3"), awaited_s=2.5, plans=(7,), steps=("",)),
        status(2, answers=False, device=words),
    )
    layers = Structure("list", (), (TENSOR, Structure("tuple", (), (TENSOR, TENSOR))))
    made = Structure("dict", (words, 7), (layers, TENSOR))
    cells = html.table([words, "b"], [(words, 1), (2, words)], right={words})
    for shown in (
        html.block("group", words, html.line(words), html.lines([words]), html.pairs([(words, words)]), cells),
        html.folded(words, words),
        html.failure(KernelError(detail=words)),
        members[1]._repr_html_(),
        GroupStatus(state="broken", detail=words, members=members)._repr_html_(),
        Work(None, Flying(2, 1, name=words, group=words), None)._repr_html_(),
        handle(made, *(tensor(at) for at in range(4)), actor=words)._repr_html_(),
    ):
        assert plain(words)[:100] in read(shown)
        assert len(shown) < 25_000


class Broken:
    def __init__(self, error):
        self.error = error

    @html.shown
    def _repr_html_(self):
        raise self.error

    def __repr__(self):
        raise self.error


class Unspeakable(Exception):
    def __str__(self):
        raise RuntimeError("no")

    __repr__ = __str__


def test_unprintable_error_does_not_raise_in_the_display_of_a_work():
    work = Work(None, Flying(3, error=Unspeakable()), None)
    assert "can't be shown: RuntimeError" in read(work._repr_html_())


def test_ctrl_c_is_raised_during_a_display():
    with pytest.raises(KeyboardInterrupt):
        Broken(KeyboardInterrupt())._repr_html_()


def test_a_group_is_a_table_of_its_ranks():
    members = (
        status(0, plans=(7, 9), steps=("in the consistency check", "")),
        status(1, awaited_s=2.5, plans=(7,), steps=("",)),
        status(2, answers=False),
    )
    told_of = read(GroupStatus(state="broken", detail="it broke", members=members)._repr_html_())
    for expected in (
        "group of 3 ranks: broken",
        "it broke",
        "7 (in the consistency check), 9",
        "2.5 s",
        "no answer",
        "10.0.0.1 (node 012345)",
    ):
        assert expected in told_of


@pytest.mark.parametrize("seed", range(5))
def test_large_group_shows_only_notable_ranks(seed):
    rng = random.Random(seed)
    strange = sorted(rng.sample(range(1000), 3))
    kinds = [{"answers": False}, {"awaited_s": 3.0}, {"doing": "train (t.py:3)"}]
    by_rank = dict(zip(strange, kinds, strict=True))
    members = tuple(status(rank, **by_rank.get(rank, {})) for rank in range(1000))
    shown = GroupStatus(state="alive", detail="", members=members)._repr_html_()
    read(shown)
    assert len(shown) < 50_000
    assert f"... {1000 - html.MOST_ROWS} more" in shown
    assert all(f"Worker({rank:06x})" in shown for rank in strange)
    ranks = [int(rank, 16) for rank in re.findall(r"Worker\((.{6})\)", shown)]
    assert ranks == sorted(ranks)
    assert len(ranks) == html.MOST_ROWS


class Flying:
    """A flight of some participants, of whom some have ended."""

    def __init__(self, count, ended=0, *, resolved=False, error=None, name="allreduce", group="default"):
        self.plan = SimpleNamespace(name=name, participants=range(count), requests=[None])
        self.seq, self.place, self.group_name, self.deadline = 7, 3, group, NEVER
        self.count, self.ended, self.error = count, ended, error
        self.resolved = resolved or error is not None

    def is_pending(self, position):
        return position >= self.ended

    def member(self, position):
        return SimpleNamespace(rank=position, actor=f"W({position})")

    def abandon(self):
        pass


@pytest.mark.parametrize(
    ("tracker", "bar", "state"),
    [
        (Flying(4), ("4", None), "under way for"),
        (Flying(4, 3), ("4", "3"), "3 of 4 have ended"),
        (Flying(4, 1, resolved=True), ("4", "4"), "done"),
        (Flying(4, 1, error=PlanAbortedError(detail="<b>")), ("4", "1"), "PlanAbortedError"),
        (Flying(4, 0, error=KernelError(detail="<b>")), ("4", "0"), "KernelError"),
    ],
)
def test_a_work_is_a_bar(tracker, bar, state):
    for work in (Work(None, tracker, None), CapturedRun(None, None, tracker, None)):
        shown = work._repr_html_()
        assert progress(shown) == bar
        assert state in read(shown)
        assert state in repr(work)
        if not tracker.resolved:
            late = [at for at in range(4) if f"rank {at} (W({at}))" in read(shown)]
            assert late == list(range(tracker.ended, 4)) * (tracker.ended > 0), (
                "who is awaited, once somebody has ended"
            )
        if tracker.error is not None:
            assert "<b>" in read(shown)


def test_a_members_work_is_a_bar():
    process_group = SimpleNamespace(name="<g>", rank=1, world_size=3, backend="shm")
    future = Future()
    work = MemberWork(process_group, "allreduce", future)
    assert "under way for" in repr(work)
    assert progress(work._repr_html_()) == ("1", None)
    assert "rank" in read(work._repr_html_())
    future.set_result(None)
    assert "'<g>': done" in read(work._repr_html_())
    assert progress(work._repr_html_()) == ("1", "1")
    failed = Future()
    failed.set_exception(KernelError(detail="<broke>"))
    assert "<broke>" in read(MemberWork(process_group, "reduce", failed)._repr_html_())
    assert "KernelError" in repr(MemberWork(process_group, "reduce", failed))


def handle(structure, *infos, actor="Worker(0a1b2c)"):
    address = Address(host="h", port=1, secret=b"")
    return Handle(key=Key(b"k"), actor_id="a", actor=actor, address=address, structure=structure, infos=infos)


def tensor(*shape, dtype="float32"):
    return TensorInfo(shape=shape, dtype=dtype, itemsize=np.dtype(dtype).itemsize)


@pytest.mark.parametrize("count", [1, 3, 4, 9])
def test_a_handle_of_several_tensors_does_not_offer_to_be_an_array(count):
    made = handle(Structure("list", (), (TENSOR,) * count), *(tensor(at + 1) for at in range(count)))
    with pytest.raises(TypeError, match=r"list of .* was used as the value: fetch the value by col\.get\(ref\)"):
        np.asarray(made)
    for shown in (repr(made), read(made._repr_html_())):
        assert "raycollect.get(ref) fetches them" in shown
        assert "asarray" not in shown
    assert (f"... ({count} tensors)" in made.words) == (count > 3)
    assert "numpy.asarray(handle) fetches it" in repr(handle(TENSOR, tensor(3)))


@pytest.mark.parametrize("count", [1, 20, 21, 10_000])
def test_many_tensors_are_counted(count):
    shown = handle(Structure("list", (), (TENSOR,) * count), *(tensor(3) for _ in range(count)))._repr_html_()
    read(shown)
    assert shown.count("float32") == min(count, 20)
    assert "[0]" in read(shown), "where it is in the list"
    assert (f"... {count - 20} more" in shown) == (count > 20)
    assert len(shown) < 12_000
