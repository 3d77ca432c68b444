"""What notebooks show: nothing of a user's is taken for HTML, it stays short, and showing it never fails."""

from __future__ import annotations

import random
import re
from concurrent.futures import Future
from types import SimpleNamespace

import numpy as np
import pytest

from raycollect import backends
from raycollect.captured.captured_run import CapturedRun
from raycollect.core import html
from raycollect.core.deadline import NEVER
from raycollect.core.model import TENSOR, Address, Key, Structure, TensorInfo
from raycollect.driver.group import Group
from raycollect.driver.group_status import GroupStatus, MemberStatus
from raycollect.driver.work import Work
from raycollect.errors import KernelError, PlanAbortedError
from raycollect.member.work import MemberWork
from raycollect.pos.handle import Handle
from tests.pure.driver.shown_html import read

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


# ---------------------------------------------------------------------------------------------- pieces


@pytest.mark.parametrize("words", HOSTILE)
def test_user_given_names_are_escaped(words):
    fragments = [
        html.block(
            "group",
            words,
            html.line(words),
            html.lines([words, words]),
            html.pairs([(words, words)]),
            html.table([words, "b"], [(words, 1), (2, words)], right={words}),
        ),
        html.folded(words, words),
        html.failure(KernelError(detail=words)),
    ]
    for shown in fragments:
        assert plain(words)[:150] in read(shown)


def test_markup_is_not_escaped_twice():
    inner = html.text("<&>")
    assert inner == "&lt;&amp;&gt;"
    assert html.text(inner) == inner
    assert read(html.line(inner)).strip() == "<&>"
    assert "<pre>" not in html.folded("more", html.line("x"))


@pytest.mark.parametrize("count", [0, 1, 5, html.MOST_ROWS, html.MOST_ROWS + 1, 1000])
def test_rows_that_are_not_shown_are_counted(count):
    shown = html.table(["n"], ((at,) for at in range(count)), count=count)
    read(shown)
    assert shown.count("<tr>") == 1 + min(count, html.MOST_ROWS) + (count > html.MOST_ROWS)
    assert (f"... {count - html.MOST_ROWS} more" in shown) == (count > html.MOST_ROWS)


def test_rows_and_heads_that_do_not_match_are_no_table():
    with pytest.raises(ValueError, match="zip"):
        html.table(["a", "b"], [("only one",)])


def test_table_makes_only_the_rows_it_shows():
    made = []

    def rows():
        for at in range(10_000):
            made.append(at)
            yield (at,)

    html.table(["n"], rows(), count=10_000, most=20)
    assert len(made) <= 21


@pytest.mark.parametrize(("ended", "count", "value"), [(None, 4, None), (0, 4, "0"), (3, 4, "3"), (0, 0, "0")])
def test_bar_shows_its_fraction(ended, count, value):
    found = re.search(r'<progress max="(\d+)"(?: value="(\d+)")?', html.bar(ended, count))
    assert found.groups() == (str(max(count, 1)), value)


def test_empty_facts_are_left_out():
    shown = html.pairs([("one", ""), ("two", 0), ("three", "x")])
    assert "one" not in shown
    assert read(shown).split() == ["two", "0", "three", "x"]
    assert html.pairs([("one", "")]) == ""


def test_an_error_is_its_first_line_and_the_rest_is_folded():
    error = ValueError("first <line>\nsecond\n" + "x" * 50_000)
    shown = html.failure(error)
    summary = re.search("<summary>(.*?)</summary>", shown)[1]
    assert summary == "ValueError: first &lt;line&gt;"
    assert "second" in shown
    assert len(shown) < html.MOST_WHOLE + 500
    assert "<details>" not in html.failure(ValueError("short"))


# ---------------------------------------------------------------------------------------------- never raises


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


@pytest.mark.parametrize("error", [ValueError("<b>"), OSError(), Unspeakable()], ids=lambda one: type(one).__name__)
def test_failing_display_shows_the_error_type(error):
    assert f"Broken, which can't be shown: {type(error).__name__}" in read(Broken(error)._repr_html_())


def test_unprintable_error_does_not_raise_in_the_display_of_a_work():
    work = Work(None, Flying(3, error=Unspeakable()), None)
    assert "can't be shown: RuntimeError" in read(work._repr_html_())


def test_ctrl_c_is_raised_during_a_display():
    with pytest.raises(KeyboardInterrupt):
        Broken(KeyboardInterrupt())._repr_html_()


# ---------------------------------------------------------------------------------------------- groups


def status(rank, **more):
    given = {
        "rank": rank,
        "actor": f"Worker({rank:06x})",
        "node_id": "0123456789ab",
        "pid": 1000 + rank,
        "ordered": True,
        "plans": (),
        "steps": (),
        "awaited_s": 0.0,
        "answers": True,
        "doing": "",
        "stack": (),
        "ended": 0,
        "story": (),
        "host": "10.0.0.1",
        "device": "GPU 0",
    }
    return MemberStatus(**{**given, **more})


@pytest.mark.parametrize("words", HOSTILE)
def test_a_group_is_a_table_of_its_ranks(words):
    members = (
        status(0, plans=(7, 9), steps=("in the consistency check", "")),
        status(1, actor=words, doing=words, stack=(words, "t.py:3"), awaited_s=2.5, plans=(7,), steps=("",)),
        status(2, answers=False, device=words),
    )
    shown = GroupStatus(state="broken", detail=words, members=members)._repr_html_()
    told_of = read(shown)
    for expected in (
        "group of 3 ranks: broken",
        "7 (in the consistency check), 9",
        "2.5 s",
        "no answer",
        "10.0.0.1 (node 012345)",
    ):
        assert expected in told_of
    assert plain(words)[:150] in told_of
    assert plain(words)[:150] in read(members[1]._repr_html_())


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


class Controller:
    """Of a group that is alive, whose members do not answer."""

    def __init__(self):
        self.groups = self.participants = self

    def exists(self, membership):
        return True

    def why_broken(self, membership):
        return ""

    def look(self, members, timeout_s):
        assert timeout_s <= 1
        return [None] * len(members)

    def trackers(self):
        return []


def declared(count, name="default", asked="auto", machines=1):
    members = tuple(
        SimpleNamespace(
            rank=rank,
            actor=f"W({rank})",
            actor_id=str(rank),
            node_id="ab",
            pid=rank,
            ordered=True,
            machine=str(rank % machines),
            address=Address(host="h", port=1, secret=b""),
            accelerators=(),
        )
        for rank in range(count)
    )
    spec = SimpleNamespace(name=name, world_size=count, backend="tcp")
    actors = [SimpleNamespace(_actor_id=SimpleNamespace(hex=lambda rank=rank: str(rank))) for rank in range(count)]
    chosen = backends.choose([one.machine for one in members]).why
    asked = SimpleNamespace(actors=actors, backend=asked)
    membership = SimpleNamespace(spec=spec, members=members, epoch=2, chosen=chosen)
    return Group(Controller(), membership, asked)


@pytest.mark.parametrize("name", HOSTILE[:5])
def test_group_name_is_escaped(name):
    shown = declared(2, name)._repr_html_()
    assert repr(name)[1:-1] in read(shown)


@pytest.mark.parametrize(
    ("count", "asked", "machines", "why"),
    [
        (1, "auto", 1, "chosen, as 1 rank is alone"),
        (3, "auto", 1, "chosen, as 3 ranks are on one machine"),
        (4, "auto", 2, "chosen, as 4 ranks are on 2 machines"),
        (4, "tcp", 2, "as it was declared"),
    ],
)
def test_a_group_says_why_it_has_its_backend(count, asked, machines, why):
    assert f"tcp, {why}" in read(declared(count, asked=asked, machines=machines)._repr_html_())


def test_large_group_has_a_short_repr():
    group = declared(1000)
    assert len(repr(group)) < 200
    assert "992 more" in repr(group)
    assert len(group._repr_html_()) < 50_000
    assert "W(2); backend" in repr(declared(3))


# ---------------------------------------------------------------------------------------------- works


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


def progress(shown):
    return re.search(r'<progress max="(\d+)"(?: value="(\d+)")?', shown).groups()


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
    for work in (Work(Controller(), tracker, None), CapturedRun(Controller(), None, tracker, None)):
        shown = work._repr_html_()
        assert progress(shown) == bar
        assert state in read(shown)
        assert state in repr(work)
        if tracker.error is not None:
            assert "<b>" in read(shown)


def test_display_names_a_few_of_many_pending_ranks():
    shown = Work(None, Flying(1000, 2), None)._repr_html_()
    assert "rank 2 (W(2))" in shown
    assert "990 more" in shown
    assert len(shown) < 2000
    assert "not ended" not in Work(None, Flying(1000), None)._repr_html_()


@pytest.mark.parametrize("words", HOSTILE)
def test_names_in_a_work_are_escaped(words):
    shown = Work(None, Flying(2, 1, name=words, group=words), None)._repr_html_()
    assert plain(words)[:100] in read(shown)


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


# ---------------------------------------------------------------------------------------------- handles


def handle(structure, *infos, actor="Worker(0a1b2c)"):
    address = Address(host="h", port=1, secret=b"")
    return Handle(key=Key(b"k"), actor_id="a", actor=actor, address=address, structure=structure, infos=infos)


def tensor(*shape, dtype="float32"):
    return TensorInfo(shape=shape, dtype=dtype, itemsize=np.dtype(dtype).itemsize)


def test_handle_display_describes_its_tensor():
    told_of = read(handle(TENSOR, tensor(1000, 10))._repr_html_())
    for expected in ("tensor, 39.06 KiB, kept in Worker(0a1b2c)", "[1000, 10]", "float32", "cpu", "numpy"):
        assert expected in told_of


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


@pytest.mark.parametrize("words", HOSTILE[:5])
def test_handle_display_gives_the_place_of_each_tensor(words):
    layers = Structure("list", (), (TENSOR, Structure("tuple", (), (TENSOR, TENSOR))))
    made = Structure("dict", (words, 7), (layers, TENSOR))
    shown = handle(made, *(tensor(at) for at in range(4)), actor=words)._repr_html_()
    told_of = read(shown)
    assert "dict of 4 tensors" in told_of
    for place in (f"[{words!r}][0]", f"[{words!r}][1][0]", f"[{words!r}][1][1]", "[7]"):
        assert place in told_of


@pytest.mark.parametrize("count", [1, 20, 21, 10_000])
def test_many_tensors_are_counted(count):
    shown = handle(Structure("list", (), (TENSOR,) * count), *(tensor(3) for _ in range(count)))._repr_html_()
    read(shown)
    assert shown.count("float32") == min(count, 20)
    assert (f"... {count - 20} more" in shown) == (count > 20)
    assert len(shown) < 12_000
