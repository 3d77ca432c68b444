"""Explanations: their text is as kept in `tests/golden`, and their other forms say the same.

`RAYCOLLECT_UPDATE_GOLDEN=1` rewrites these files; read the difference before you keep it.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from xml.etree import ElementTree as ET

import ml_dtypes  # noqa: F401 - numpy knows bfloat16 by it
import pytest

from raycollect.core.model import OpKind, TensorInfo
from raycollect.planner import plan
from raycollect.planner.explain import explain
from raycollect.planner.layout import layout
from raycollect.planner.reshard.request import local_tensors
from tests.pure.planner.explained import gathering, info, membership, mixed, overlapping, step, told, tree
from tests.pure.resharding import bound, request_of

GOLDEN = Path(__file__).parents[2] / "golden"


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


SHOWN = {make.__name__: make for make in (tree, mixed, ring, overlapping, resharded, step)}


@pytest.mark.parametrize("name", SHOWN)
def test_the_text_is_as_kept(name):
    shown, path = SHOWN[name]().explain(), GOLDEN / f"{name}.txt"
    if os.environ.get("RAYCOLLECT_UPDATE_GOLDEN"):
        path.write_text(shown, encoding="utf-8")
        pytest.skip(f"{path.name} was rewritten")
    assert shown == path.read_text(encoding="utf-8")


def test_every_golden_file_has_its_plan():
    assert {path.name for path in GOLDEN.iterdir()} == {f"{name}.txt" for name in SHOWN}


@pytest.mark.parametrize("name", SHOWN)
def test_the_other_forms_say_the_same(name):
    explanation = SHOWN[name]()
    text = explanation.explain()
    page = ET.fromstring(explanation._repr_html_())
    assert page.find(".//pre").text == text
    assert len(page.findall(".//tbody/tr")) == sum(len(one.cells()) for one in explanation.plans)
    assert json.loads(json.dumps(explanation.to_dict())) == explanation.to_dict()
    assert str(explanation) == text
    assert text.splitlines()[0] in repr(explanation)


def test_a_step_has_the_totals_of_its_plans():
    step = SHOWN["step"]()
    values = step.to_dict()
    assert (values["launches"], values["calls"]) == (2, 18)
    for name in ("nbytes_inside", "nbytes_between", "time_s"):
        assert values[name] == sum(stage[name] for stage in values["stages"] if name in stage)
    memories = [plan.memory for plan in step.plans]
    assert values["memory"]["outputs"] == sum(memory.outputs for memory in memories) > 0
    assert values["memory"]["packing"] == max(memory.packing for memory in memories) > 0
    assert values["memory"]["chunks"] == [["digits", 2 << 20]]
