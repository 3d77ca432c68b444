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
        mixed,
        ring,
        dependent,
        overlapping,
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
def test_it_is_text_html_json_and_a_short_repr(name):
    found = SHOWN[name]()
    lines = found.explain().split("\n")
    assert lines == [line.rstrip() for line in lines]
    assert "".join(lines).isascii()
    assert (lines[-1], str(found)) == ("", found.explain())
    shown, page = found._repr_html_(), Page()
    page.feed(shown)
    page.close()
    assert page.open == []
    assert "<&>" not in shown
    assert "<0>" not in shown
    assert any("left <&>" in text for text in page.text) == (name == "overlapping")
    assert any("Trainer<0>" in text for text in page.text) == (name in STEPS)
    assert (page.text.count("calls") > 0) == (name != "methods_only"), "a table of the calls"
    assert json.loads(json.dumps(found.to_dict())) == found.to_dict()
    assert len(repr(found)) < 150
    if name in PLANS:
        assert found.to_dict()["rows"][0]["algorithm"] == found.rows[0].algorithm
        assert found.name in repr(found)
