"""The notebooks run, in real kernels on the Ray of the tests, and show what is stored in them."""

from __future__ import annotations

import base64
import json

import pytest

pytest.importorskip("nbclient", reason="what `make install-test-full` installs")
pytest.importorskip("ipykernel")

import nbformat
import ray

from examples.notebooks import refresh

MOST_PLOT_NBYTES = 60_000
MOST_NOTEBOOK_NBYTES = 200_000


def code_cells(notebook):
    return [cell for cell in notebook.cells if cell.cell_type == "code"]


@pytest.mark.full
@pytest.mark.parametrize("name", refresh.NAMES)
def test_notebook_outputs_equal_the_stored_ones(cluster, tmp_path, name):
    stored = refresh.load(name)
    environment = refresh.environment_of(ray.get_runtime_context().gcs_address, str(tmp_path))
    fresh = refresh.run(stored, environment)
    for before, now in zip(code_cells(stored), code_cells(fresh), strict=True):
        assert refresh.words(now) == refresh.words(before), f"cell {now.id!r}: python -m examples.notebooks.refresh"
        failed = [output.ename for output in now.outputs if output.output_type == "error"]
        assert len(failed) == (refresh.FAILS in refresh.tags(now)), f"cell {now.id!r}: {failed}"


@pytest.mark.parametrize("name", refresh.NAMES)
def test_stored_outputs_are_small_and_machine_independent(name):
    stored = refresh.load(name)
    text = nbformat.writes(stored)
    assert len(text) < MOST_NOTEBOOK_NBYTES
    outputs = [output for cell in code_cells(stored) for output in cell.outputs]
    plots = [output.data["image/png"] for output in outputs if "image/png" in output.get("data", {})]
    assert all(len(base64.b64decode(plot)) < MOST_PLOT_NBYTES for plot in plots)
    told = json.dumps([output for output in outputs if "image/png" not in output.get("data", {})])
    assert not [word for word in ("site-packages", "/home/", "/root/", "/tmp/ray", "Traceback") if word in told]
    assert [cell.execution_count for cell in code_cells(stored)] == list(range(1, len(code_cells(stored)) + 1))


def test_significant_output_is_compared_and_varying_output_is_masked():
    same = ("pid 12, took 3.5 ms", "pid 1234, took 12 us"), ("<Worker(0123ab)>", "<Worker(ba3210)>")
    other = ("rank 1", "rank 2"), ("[7. 7.]", "[8. 8.]"), ("20 B", "40 B"), ("in load", "in save")
    assert all(refresh.masked(one) == refresh.masked(two) for one, two in same)
    assert all(refresh.masked(one) != refresh.masked(two) for one, two in other)
