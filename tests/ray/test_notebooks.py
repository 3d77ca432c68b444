"""The notebooks run and show what is stored in them; and what a kernel of Jupyter does to a session besides.

Cells are run by real kernels, which join the Ray of the tests.
"""

from __future__ import annotations

import base64
import json
import re
import time

import pytest

pytest.importorskip("nbclient", reason="what `make install-test-full` installs")
pytest.importorskip("ipykernel")

import nbformat
from jupyter_client.manager import KernelManager
from nbclient.exceptions import CellExecutionError

from examples.notebooks import refresh
from raycollect.driver.group_status import GroupStatus
from tests.pure.driver.shown_html import read, status

TIMEOUT_S = 60
SOON_S = 8
"""How soon a cell has to end after its interrupt, where a machine is shared with other tests; nothing in it ends by
itself before `TIMEOUT_S`."""

LATE = ["collectives under way", "awaited for"]

MOST_PLOT_NBYTES = 60_000
MOST_NOTEBOOK_NBYTES = 200_000


@pytest.fixture(scope="module")
def environment(cluster, tmp_path_factory):
    """That of a kernel on the Ray of the tests."""
    import ray

    home = str(tmp_path_factory.mktemp("home"))
    return refresh.environment_of(ray.get_runtime_context().gcs_address, home)


# ---------------------------------------------------------------------------------------------- the notebooks


def code_cells(notebook):
    return [cell for cell in notebook.cells if cell.cell_type == "code"]


@pytest.mark.full
@pytest.mark.parametrize("name", refresh.NAMES)
def test_notebook_outputs_equal_the_stored_ones(environment, name):
    stored = refresh.load(name)
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
    assert all(cell.id in text for cell in stored.cells)


def test_there_are_notebooks():
    assert set(refresh.NAMES) == {"debugging", "tour", "training", "weights"}


def notebook_of(*cells):
    made = [nbformat.v4.new_code_cell(source, metadata={"tags": tags}) for source, *tags in cells]
    return nbformat.v4.new_notebook(cells=made)


@pytest.mark.full
def test_unplanned_cell_failure_is_raised(environment):
    planned, not_planned = ("1 / 0", refresh.FAILS), ("[][0]",)
    with pytest.raises(CellExecutionError, match="IndexError"):
        refresh.run(notebook_of(planned, not_planned), environment)


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ("pid 12, took 3.5 ms", "pid 1234, took 12 us"),
        ("<Group of Worker(0123ab)>", "<Group of Worker(ba3210)>"),
        ("10.0.0.1 (node 12ab34)", "192.168.0.12 (node 56cd78)"),
        ("/tmp/ipykernel_12/3456.py:7 in f", "/var/x/ipykernel_9/3456.py:7 in f"),
        ("in Worker.load (a cell, line 3)", "in load (a cell, line 3)"),
    ],
)
def test_varying_output_is_masked(one, other):
    assert refresh.masked(one) == refresh.masked(other)


@pytest.mark.parametrize(
    ("one", "other"),
    [("rank 1", "rank 2"), ("[7. 7.]", "[8. 8.]"), ("20 B", "40 B"), ("3 ranks", "2 ranks"), ("in load", "in save")],
)
def test_significant_output_is_not_masked(one, other):
    assert refresh.masked(one) != refresh.masked(other)


# ---------------------------------------------------------------------------------------------- displays


def columns_of(group):
    return re.findall(r"<th [^>]*>([^<]*)</th>", group._repr_html_())


WHO = ["rank", "actor", "host", "pid", "device"]


@pytest.mark.parametrize(
    ("state", "members", "expected"),
    [
        ("alive", [{}, {}], [*WHO, "state"]),
        (
            "alive",
            [{}, {"plans": (7,), "steps": ("in the consistency check",)}],
            [*WHO, "state", "collectives under way"],
        ),
        ("alive", [{"plans": (7,), "steps": ("",), "awaited_s": 2.5}], [*WHO, "state", *LATE]),
        ("destroyed", [{"answers": False}], WHO),
    ],
)
def test_a_group_is_shown_with_the_columns_that_say_something(state, members, expected):
    told = [status(rank, **one) for rank, one in enumerate(members)]
    group = GroupStatus(state=state, detail="", members=tuple(told))
    assert columns_of(group) == expected
    assert f"group of {len(members)} rank" in read(group._repr_html_())


def test_a_cell_is_not_shown_as_a_file():
    where = "/tmp/ipykernel_12/3456.py:9"
    busy = status(
        0, doing=f"Worker.load ({where})", stack=(f"{where} in Worker.load: ", "/home/me/ml.py:3 in f: wait()")
    )
    told = read(GroupStatus(state="alive", detail="", members=(busy,))._repr_html_())
    assert "in Worker.load (a cell, line 9)" in told
    assert "/home/me/ml.py:3" in told
    assert "ipykernel" not in told


# ---------------------------------------------------------------------------------------------- a kernel

SESSION = """
%load_ext autoreload
%autoreload 2
import asyncio, sys, threading, time, traceback
import numpy as np, ray
import raycollect as col
from raycollect.driver import stall_report as diagnosis
from raycollect.driver.step_runs import StepRuns

ray.init(log_to_driver=False, logging_level="error", namespace="notebooks")


@ray.remote(num_cpus=0)
class Worker(col.CollectiveParticipant):
    def __init__(self):
        self.buffer = np.ones(10, np.float32)

    def get_buffer(self):
        return self.buffer

    def note(self):
        return 1

    def wait(self, gate):
        ray.get(gate.wait.remote())


@ray.remote(num_cpus=0, max_concurrency=4)
class Gate:
    def __init__(self):
        self.opened = threading.Event()

    def wait(self):
        self.opened.wait()

    def open(self):
        self.opened.set()

    def shut(self):
        self.opened.clear()


def tell_when_it_waits():
    "Says so once the main thread waits for a collective or a run."
    places = diagnosis.wait.__code__, StepRuns.wait.__code__

    def look():
        frames = lambda: traceback.walk_stack(sys._current_frames()[threading.main_thread().ident])
        while not any(frame.f_code in places for frame, _ in frames()):
            time.sleep(0.005)
        print("it waits", flush=True)

    threading.Thread(target=look).start()


def total():
    "What the sum is now, and that the group works: it sums once more."
    return float(col.get(col.allreduce_refs(refs))[1][0]), group.status().state
"""

ACTORS = """
gate, workers = Gate.remote(), [Worker.remote() for _ in range(2)]
group = col.declare_collective_group(workers)
refs = [worker.get_buffer.remote() for worker in workers]
"""


class Kernel:
    """A kernel of Jupyter, and the front end of it."""

    def __init__(self, environment):
        self.environment = environment
        self.manager = KernelManager(transport="ipc")
        self.manager.start_kernel(env=environment)
        self.client = self.manager.client()
        self.client.start_channels()
        self.client.wait_for_ready(TIMEOUT_S)

    def begin(self, code):
        return self.client.execute(code, store_history=False)

    def messages(self, cell):
        """What comes until a cell has ended."""
        until_s = time.monotonic() + TIMEOUT_S
        while True:
            message = self.client.get_iopub_msg(timeout=until_s - time.monotonic())
            yield message
            is_of_it = message["parent_header"].get("msg_id") == cell
            if is_of_it and message["content"].get("execution_state") == "idle":
                return

    def run(self, code):
        """Runs a cell that must not fail; what its last line is."""
        values = []
        for message in self.messages(self.begin(code)):
            assert message["msg_type"] != "error", message["content"]["evalue"]
            if message["msg_type"] == "execute_result":
                values.append(message["content"]["data"]["text/plain"])
        return "".join(values)

    def error_of(self, cell):
        """The name of the error with which a cell ends."""
        names = [one["content"]["ename"] for one in self.messages(cell) if one["msg_type"] == "error"]
        assert len(names) == 1
        return names[0]

    def interrupt(self, code):
        """Interrupts a cell once it says that it waits; the name of the error with which it ends."""
        cell = self.begin(code)
        told = self.messages(cell)
        for message in told:
            assert message["msg_type"] != "error", message["content"]["evalue"]
            if "it waits" in message["content"].get("text", ""):
                break
        else:
            pytest.fail("it did not wait")
        began_s = time.monotonic()
        self.manager.interrupt_kernel()
        names = [one["content"]["ename"] for one in told if one["msg_type"] == "error"]
        assert time.monotonic() - began_s < SOON_S
        assert len(names) == 1
        return names[0]

    def restart(self):
        self.manager.restart_kernel(now=True)
        self.client.wait_for_ready(TIMEOUT_S)

    def end(self):
        self.client.stop_channels()
        self.manager.shutdown_kernel(now=True)


@pytest.fixture(scope="module")
def session(environment):
    """A kernel with a group of two workers, `refs` of theirs and a gate."""
    kernel = Kernel(environment)
    try:
        kernel.run(SESSION)
        kernel.run(ACTORS)
        yield kernel
    finally:
        kernel.end()


@pytest.fixture
def held(session):
    """Rank 1 is in a method until the gate opens; afterwards all is well, and the sum is twice what it was."""
    session.run("ray.get(gate.shut.remote()); blocked = workers[1].wait.remote(gate)")
    yield session
    session.run("ray.get([gate.open.remote(), blocked])")


OPEN = "ray.get([gate.open.remote(), blocked])"
NOW = "before = float(col.get(refs[0])[0]); before"


@pytest.mark.parametrize(
    "waits", ["col.allreduce_refs(refs)", "with col.batch():\n    col.allreduce_refs(refs)", "col.barrier()"]
)
def test_an_interrupt_of_a_call_cancels_it(session, held, waits):
    before = float(session.run(NOW))
    assert session.interrupt(f"tell_when_it_waits()\n{waits}") == "KeyboardInterrupt"
    session.run("group.statistics();")  # who has answered has heard of it
    session.run(OPEN)
    assert session.run("total()") == str((2 * before, "alive"))


WORK = "work = col.allreduce_refs(refs, async_op=True)"
AWAIT = "asyncio.get_running_loop().call_soon(print, 'it waits')\n"


@pytest.mark.parametrize(
    ("waits", "error"),
    [("tell_when_it_waits()\nwork.wait()", "KeyboardInterrupt"), (f"{AWAIT}await work", "CancelledError")],
)
def test_an_interrupt_of_a_wait_leaves_the_collective(session, held, waits, error):
    before = float(session.run(NOW))
    session.run(WORK)
    assert session.interrupt(waits) == error
    assert session.run("work.done()") == "False"
    session.run(OPEN)
    assert session.run("(await work) is work.refs") == "True"
    assert session.run("work.wait() is work.refs") == "True"
    assert session.run("total()") == str((4 * before, "alive"))


@pytest.mark.parametrize(
    ("waits", "error"),
    [
        ("tell_when_it_waits()\nstep.run()", "KeyboardInterrupt"),
        (f"{AWAIT}await step.run(async_op=True)", "CancelledError"),
    ],
)
def test_an_interrupt_of_a_run_leaves_the_step(session, waits, error):
    session.run("with col.capture() as step:\n    step.returns([step.call(one.note) for one in workers])")
    session.run("step.run()")
    session.run("ray.get(gate.shut.remote()); blocked = workers[1].wait.remote(gate)")
    session.run("while 'wait' not in group.status().members[1].doing: time.sleep(0.005)")
    assert session.interrupt(waits) == error
    session.run(OPEN)
    assert session.run("step.run()") == "[1, 1]"
    assert session.run("step") == "<Capture of 0 collectives and 2 method calls: ready>"
    session.run("step.close()")
    assert session.run("total()[1]") == "'alive'"


# ---------------------------------------------------------------------------------------------- cells again


def test_cells_that_declare_can_be_run_again(session):
    """The class anew, then its actors and the group: refused while the old group is there, and well once it is not."""
    declaration = SESSION[
        SESSION.index("@ray.remote(num_cpus=0)\nclass Worker") : SESSION.index("@ray.remote(num_cpus=0, max")
    ]
    again = "more = [Worker.remote() for _ in range(2)]\nother = col.declare_collective_group(more)"
    session.run(declaration)
    assert session.error_of(session.begin(again)) == "GroupExistsError"
    assert session.run("total()[1]") == "'alive'"  # the old one goes on with its actors of the old class
    session.run("group.destroy()")
    session.run("group = col.declare_collective_group([workers[0], *more])")  # a class of two cells, in one group
    session.run("refs = [worker.get_buffer.remote() for worker in group.actors]")
    assert session.run("total()[1]") == "'alive'"
    session.run("group.destroy(); group = col.declare_collective_group(workers)")
    session.run("refs = [worker.get_buffer.remote() for worker in workers]; del more")


@pytest.mark.full  # tests/faults/test_drivers.py has a driver that follows another
def test_actors_that_outlive_a_restart_are_driven_by_the_new_kernel(session):
    """The last test of this kernel: its names are gone."""
    session.run(
        "group.destroy(); kept = [Worker.options(name=f'kept-{at}', lifetime='detached').remote() for at in range(2)]"
    )
    session.run("group = col.declare_collective_group(kept)")
    session.run("col.allreduce_refs([one.get_buffer.remote() for one in kept])")
    session.restart()
    session.run(SESSION)
    session.run("kept = [ray.get_actor(f'kept-{at}') for at in range(2)]")
    try:
        session.run("group = col.declare_collective_group(kept)")
        session.run("refs = [one.get_buffer.remote() for one in kept]")
        assert session.run("total()") == str((4.0, "alive"))  # what the first kernel had them sum up is still there
    finally:
        session.run("[ray.kill(one) for one in kept]")
