"""Explanations: their text and HTML are as kept in `tests/golden`.

`RAYCOLLECT_UPDATE_GOLDEN=1` rewrites these files; read the difference before you keep it.
"""

from __future__ import annotations

import html.parser
import json
import os
from pathlib import Path

import ml_dtypes  # noqa: F401 - numpy knows bfloat16 by it
import pytest

from raycollect.core.model import OpKind, TensorInfo
from raycollect.planner import plan
from raycollect.planner.explain import explain
from raycollect.planner.layout import layout
from raycollect.planner.reshard.request import local_tensors
from tests.pure.planner.explained import (
    allreduce,
    broadcast,
    brought,
    dependent,
    gathering,
    info,
    membership,
    methods_only,
    mixed,
    native,
    overlapping,
    step,
    told,
    tree,
)
from tests.pure.resharding import bound, request_of

GOLDEN = Path(__file__).parents[2] / "golden"


def fused():
    there = membership([0] * 4)
    tags = ["a", "b", "c", "d", "large"]
    held = {tag: info(1000 + at) for at, tag in enumerate(tags)} | {"large": info(1 << 20)}
    return told([allreduce(there, tag) for tag in tags], there, held)


def in_order():
    there = membership([0] * 3 + [1] * 3 + [2] * 2, backend="tcp")
    requests = [broadcast(there, 4, "large"), broadcast(there, 0, "small")]
    return told(requests, there, {"large": info(1 << 24), "small": info(10)})


def pairwise():
    there = membership([0] * 3, backend="sends_only", ops=[OpKind.SEND, OpKind.RECV])
    return told([gathering(OpKind.ALLTOALL, there)], there, {"x": info(300)})


def ring():
    there = membership([0, 0, 1], backend="sends_only", ops=[OpKind.SEND, OpKind.RECV])
    return told([gathering(OpKind.ALLGATHER, there)], there, {"x": info(300)})


def resharded():
    """A norm that all hold, and a matrix from rows on one host to columns on both; rank 1 gives and takes."""
    there = membership([0, 0, 1, 1], backend="tcp")
    src = {"norm": layout([64], mesh={"tp": 2}), "up": layout([256, 64], mesh={"tp": 2}, spec=("tp",))}
    dst = {"norm": layout([64], mesh={"tp": 3}), "up": layout([256, 64], mesh={"dp": 3}, spec=())}
    request = request_of(bound(src, dst, (0, 1), (1, 2, 3)), there.spec)
    planned = plan([request], [there])
    held = {
        2 * ranks[at] + odd: tuple(TensorInfo(shape=one.shape, dtype=one.dtype, itemsize=one.itemsize) for one in some)
        for side, ranks, odd in ((src, (0, 1), 0), (dst, (1, 2, 3), 1))
        for at, some in local_tensors(tuple(side.items())).items()
    }
    return explain(planned, {source: held[source] for source in planned.uses()})


PLANS = {
    one.__name__: one
    for one in (
        native,
        fused,
        tree,
        in_order,
        mixed,
        pairwise,
        ring,
        dependent,
        overlapping,
        brought,
        resharded,
    )
}


STEPS = {one.__name__: one for one in (step, methods_only)}


SHOWN = {**PLANS, **STEPS}


@pytest.mark.parametrize("name", SHOWN)
def test_it_is_told_as_it_was(name):
    shown = SHOWN[name]().explain()
    path = GOLDEN / f"{name}.txt"
    if os.environ.get("RAYCOLLECT_UPDATE_GOLDEN"):
        path.write_text(shown, encoding="utf-8")
        pytest.skip(f"{path.name} was rewritten")
    assert shown == path.read_text(encoding="utf-8")


def test_every_golden_file_has_its_plan():
    assert {path.name for path in GOLDEN.iterdir()} == {f"{name}.txt" for name in SHOWN}


@pytest.mark.parametrize("name", SHOWN)
def test_text_is_ascii_and_has_no_loose_ends(name):
    lines = SHOWN[name]().explain().split("\n")
    assert "".join(lines).isascii()
    assert lines == [line.rstrip() for line in lines]
    assert lines[-1] == ""


class Page(html.parser.HTMLParser):
    """Checks that tags are closed in order, and keeps the text."""

    def __init__(self):
        super().__init__()
        self.open, self.text = [], []

    def handle_starttag(self, tag, attrs):
        self.open.append(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        self.text.append(data)


@pytest.mark.parametrize("name", SHOWN)
def test_html_is_well_formed_and_what_the_user_named_is_escaped(name):
    shown = SHOWN[name]()._repr_html_()
    page = Page()
    page.feed(shown)
    page.close()
    assert page.open == []
    assert "<&>" not in shown
    if name == "overlapping":
        assert any("left <&>" in text for text in page.text)
    assert (page.text.count("calls") > 0) == ("rows" in dir(SHOWN[name]()) or name == "step"), "a table of the calls"
    if name in STEPS:
        assert any("Trainer<0>" in text for text in page.text)
        assert "<0>" not in shown


@pytest.mark.parametrize("name", SHOWN)
def test_it_becomes_json_and_a_short_repr(name):
    found = SHOWN[name]()
    assert json.loads(json.dumps(found.to_dict())) == found.to_dict()
    assert len(repr(found)) < 150
    assert str(found) == found.explain()


@pytest.mark.parametrize("name", PLANS)
def test_its_rows_are_in_the_dict_and_its_name_in_the_repr(name):
    found = PLANS[name]()
    assert found.to_dict()["rows"][0]["algorithm"] == found.rows[0].algorithm
    assert found.name in repr(found)
