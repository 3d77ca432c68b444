"""The tables of the documents: made from the capability table, and up to date."""

from __future__ import annotations

import dataclasses
import importlib.util
from pathlib import Path

import pytest

import raycollect
from raycollect import backends
from raycollect.core.model import OpKind
from tests.pure.meaning import KINDS

ROOT = Path(raycollect.__file__).parents[1]
_SPEC = importlib.util.spec_from_file_location("support_matrix", ROOT / "docs" / "support_matrix.py")
assert _SPEC is not None
assert _SPEC.loader is not None
matrix = importlib.util.module_from_spec(_SPEC)  # docs/ is no package
_SPEC.loader.exec_module(matrix)
PAGE = ROOT / "docs" / "backends.md"


def rows(text: str) -> dict[str, list[str]]:
    cells = [[cell.strip(" `") for cell in line.strip("|").split("|")] for line in text.splitlines() if line[:1] == "|"]
    return {first: rest for first, *rest in cells}


def test_the_page_is_up_to_date() -> None:
    pytest.importorskip("torch", reason="the line of torch:gloo asks torch's adapter")
    assert not matrix.write(PAGE, check=True), "python docs/support_matrix.py --write docs/backends.md"


def test_each_backend_and_device_has_a_column_and_each_operation_a_row() -> None:
    table = rows(matrix.support_matrix())
    assert table["Backend"] == list(backends.BACKENDS)
    assert dict(zip(table["Backend"], table["Device"], strict=True))["torch:sccl"] == "TPU"
    assert [name for name in table if name in {kind.value for kind in OpKind}] == [kind.value for kind in OpKind]
    many = dataclasses.replace(backends.BACKENDS["torch:gloo"], devices=frozenset({"cpu", "cuda"}))
    assert rows(matrix.support_matrix([many]))["Device"] == ["CPU", "CUDA"]


def test_what_a_vendor_lacks_is_made_or_refused() -> None:
    text = matrix.support_matrix()
    table = rows(text)
    at = table["Backend"].index("torch:sccl")
    names = [kind.value for kind in (*KINDS, OpKind.RECV)]
    assert (table["Backend"][at], table["Device"][at], table["Status"][at]) == ("torch:sccl", "TPU", "experimental")
    assert {name: cells[at] for name, cells in table.items() if name in names and cells[at] != "✔"} == {
        "reducescatter": "✔ (1)",
        "scan": "✘",
        "exscan": "✘",
        "send": "✘",
        "recv": "✘",
    }
    assert "(1) made by the planner, as `reduce` and `scatter`." in text
    assert "for want of the hardware or the library: `nccl`, `torch:mpi`" in text


def test_reductions_are_native_folded_or_refused() -> None:
    def marks(backend: str) -> dict[str, list[str]]:
        table = rows(matrix.reduction_table([backends.BACKENDS[backend]]))
        return {dtype: cells for names, cells in table.items() for dtype in names.split(", ")}

    ours, gloo = marks("shm"), marks("gloo")
    ops = ours["dtype"]
    assert ops == ["SUM", "PRODUCT", "MIN", "MAX", "AVG", "BAND", "BOR", "BXOR"]
    assert {mark for dtype in matrix.DTYPES for mark in ours[dtype]} == {"F", "✘"}
    for backend in (ours, gloo):
        assert backend["int32"][ops.index("AVG")] == "✘"
        assert backend["complex64"][ops.index("MIN")] == "✘"
        assert backend["bfloat16"][ops.index("SUM")] == "F"
        assert backend["float32"][ops.index("BXOR")] == "✘"
    assert gloo["float32"][ops.index("SUM")] == "N"
    assert gloo["int16"][ops.index("SUM")] == "F"
