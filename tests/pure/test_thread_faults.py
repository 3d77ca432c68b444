"""Each thread of the library outlives what it calls: a fault in each, one by one, after which all goes on.

The threads of a group's members, of a participant, and those that only Ray's actors have are in the files of this name
in `group`, `member` and `tests/faults`.
"""

from __future__ import annotations

import ast
import re
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from queue import SimpleQueue
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest

import raycollect
from raycollect.backends.nccl import communicator as nccl
from raycollect.channel import DataClient, Server
from raycollect.channel.messages import Done, Fetch, Fetched
from raycollect.core import threads
from raycollect.core.model import Kernel, Key, Launch, OpKind
from raycollect.errors import BackendUnavailableError, PlanAbortedError, from_wire
from raycollect.group import cluster_registry
from raycollect.pos import Store
from raycollect.pos.fetch import serve
from raycollect.ray_bridge import direct_transport
from tests.faults import test_thread_faults as of_actors
from tests.faults.thread_failures import fail_at
from tests.pure.backends.test_nccl_join import create
from tests.pure.channel.parties import HOST, SECRET, Party, Rig, echo, rig
from tests.pure.fleet import contain
from tests.pure.group import test_thread_faults as of_members
from tests.pure.member import test_thread_faults as of_participants
from tests.pure.on_gpu import gpus
from tests.pure.thread_faults import BOOM, WAIT_S, fault_in, threads_tested

__all__ = ["rig"]  # a fixture


# ---------------------------------------------------------------------------------------------- the table


def in_the_table() -> set[str]:
    text = (Path(raycollect.__file__).parent.parent / "ARCHITECTURE.md").read_text()
    table = text.partition("## Processes, threads, connections")[2].partition("| connection |")[0]
    return set(re.findall(r"^\|[^|]*\| `(raycollect-[a-z.-]+)` \|", table, re.MULTILINE))


def in_the_source() -> tuple[set[str], list[str]]:
    """What threads the package starts, by the name that each call gives; and the calls that give none."""
    names, nameless = set[str](), []
    for path in Path(raycollect.__file__).parent.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            called = ast.unparse(node.func) if isinstance(node, ast.Call) else ""
            if called == "threads.call_in_helper":
                names.add("raycollect-helper")
            if called in ("threads.start", "threads.pool", "threads.beside", "Loop"):
                first = cast(ast.Call, node).args[0]
                if called == "threads.start" and path.name == "loop.py":
                    continue  # its name is given to `Loop`
                parts = [*ast.walk(first)]
                text = next((one.value for one in parts if isinstance(one, ast.Constant)), None)
                nameless += [] if text else [f"{path.name}:{first.lineno}"]
                names.add(f"{text}{'...' if isinstance(first, ast.JoinedStr) else ''}")
            elif called in ("Thread", "threading.Thread", "ThreadPoolExecutor", "threading.Timer") and not _is_apart(
                path
            ):
                nameless.append(f"{path.name}:{node.lineno}")  # type: ignore[attr-defined]
    return names, nameless


def _is_apart(path: Path) -> bool:
    """It starts all of them."""
    return path.name == "threads.py"


def test_each_thread_of_the_package_is_in_the_table_and_has_a_fault() -> None:
    names, nameless = in_the_source()
    assert nameless == [], "threads are started by `raycollect.core.threads`, with a name that can be read here"
    assert in_the_table() == names
    assert of_actors.TESTED | threads_tested(sys.modules[__name__], of_members, of_participants) == names


def test_the_number_of_places_is_that_of_the_table() -> None:
    """All calls by `threads.call_in_helper` are one place."""
    package = Path(raycollect.__file__).parent
    calls = [
        ast.unparse(node.func)
        for path in package.rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Call)
    ]
    told = re.search(
        r"^\| places that start threads \| (\d+) \|", (package.parent / "ARCHITECTURE.md").read_text(), re.M
    )
    assert told is not None
    assert int(told[1]) == calls.count("threads.start") + calls.count("threads.pool") + 1


# ---------------------------------------------------------------------------------------------- the channel


@fault_in("raycollect-server", "raycollect-hub")
@pytest.mark.parametrize(("thread", "at_server"), [("raycollect-server", True), ("raycollect-hub", False)])
def test_an_end_that_fails_tells_the_other_why(rig: Rig, thread: str, at_server: bool) -> None:
    """A failure that the handler can't go on from ends the connection. Other connections come and go."""
    party, mine = Party(echo), Party()
    address = rig.serve(party)
    with fail_at(party if at_server else mine, "received", thread=thread):
        rig.connect(address, mine).send(Done(seq=1, ranks=[], error=None, story=[]))
        reasons = [one.reasons.get(timeout=WAIT_S).detail for one in (party, mine)]
        failed, other = reasons if at_server else reasons[::-1]
    assert failed.startswith(f"this end failed: taking in Done failed: {BOOM}")
    assert other.startswith(f"the other end failed: taking in Done failed: {BOOM}")
    rig.connect(address, mine).send(Done(seq=2, ranks=[], error=None, story=[]))
    assert mine.messages.get(timeout=WAIT_S) == Done(seq=2, ranks=[], error=None, story=[])


@fault_in("raycollect-server")
def test_a_server_accepts_again_after_a_failure(rig: Rig) -> None:
    """The connection that was there goes on as well."""
    mine = Party()
    with fail_at(Server, "_accept", thread="raycollect-server"):
        link = rig.connect(rig.serve(Party(echo)), mine)
    link.send(Done(seq=1, ranks=[], error=None, story=[]))
    assert mine.messages.get(timeout=WAIT_S)


@fault_in("raycollect-data-...")
def test_a_request_that_fails_is_answered_and_the_next_one_too() -> None:
    store, key = Store(), Key(bytes(28))
    store.put(key, contain(np.arange(3)))
    party = Party()
    party.serve_data = lambda link: serve(link, store)  # type: ignore[method-assign]
    server = Server(HOST, SECRET, party)
    client = DataClient(server.address, WAIT_S)
    request = Fetch(key=key)
    try:
        with fail_at(store, "current", thread="raycollect-data-"):
            answer: Any = client.request(request)
        assert str(from_wire(answer.error)).startswith(f"answering Fetch failed: {BOOM}")
        found = client.request(request)
        assert isinstance(found, Fetched)
        assert found.blob_nbytes == 24
    finally:
        client.close()
        server.close()


# ---------------------------------------------------------------------------------------------- the driver


@fault_in("raycollect-post")
def test_the_next_record_is_posted_after_a_failure() -> None:
    put = SimpleQueue[bytes]()
    store = SimpleNamespace(put=put.put)
    membership: Any = SimpleNamespace(spec=SimpleNamespace(name="g", group_id="id of g"))
    with fail_at(store, "put", thread="raycollect-post"):
        cluster_registry._soon(membership, lambda key: store.put(key))
    cluster_registry._soon(membership, lambda key: store.put(key))
    assert put.get(timeout=WAIT_S).endswith(b"id of g")


@fault_in("raycollect-helper")
def test_who_waits_for_a_ref_that_ray_moves_hears_of_a_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    came = SimpleQueue[Any]()
    caller = SimpleNamespace(heard=came.put)
    monkeypatch.setattr(direct_transport, "is_direct", lambda ref: True)
    monkeypatch.setattr(direct_transport, "get", lambda ref: "the value")

    def wait() -> None:
        direct_transport.on_completed(object(), lambda value: caller.heard(value))

    with fail_at(direct_transport, "get", thread="raycollect-helper"):
        wait()
        assert str(came.get(timeout=WAIT_S)).startswith(f"waiting for a ref failed: {BOOM}")
    with fail_at(caller, "heard", thread="raycollect-helper"):
        wait()
    wait()
    assert came.get(timeout=WAIT_S) == "the value"


# ---------------------------------------------------------------------------------------------- backends


@fault_in("raycollect-vllm")
@pytest.mark.parametrize("block", [None, BrokenPipeError(), PlanAbortedError(detail="the other side refused")])
def test_what_the_other_side_of_an_update_of_vllm_raises_is_the_error(block: Exception | None) -> None:
    def refuse() -> None:
        raise LookupError(BOOM)

    with (
        pytest.raises(BrokenPipeError if isinstance(block, BrokenPipeError) else LookupError),
        threads.beside("raycollect-vllm", refuse) as called,
    ):
        assert isinstance(called.exception(WAIT_S), LookupError)
        if block is not None:
            raise block


@fault_in("raycollect-helper")
def test_who_waits_for_a_call_of_torch_gets_its_error() -> None:
    pytest.importorskip("torch")
    from raycollect.backends.torch_dist.calls import Calls

    launch = Launch(seq=1, ranks=(0,), timeout_s=WAIT_S)
    library: Any = SimpleNamespace(backend=None, rank=0, world_size=1, group_name="g")
    calls = Calls(library, launch, lambda launch: None)
    work = SimpleNamespace(wait=lambda timeout: True)
    with fail_at(work, "wait", thread="raycollect-helper"), pytest.raises(TypeError, match="injected"):
        calls._wait_beside(work)
    calls._wait_beside(work)


@contextmanager
def alone_on_a_gpu() -> Iterator[tuple[Any, Any]]:
    """A rank by itself on the fake of cupy, and the fake."""
    with gpus(1) as fake:
        made = create(0, 1)
        try:
            yield made, fake
        finally:
            made.close()


def run_barrier(communicator: Any) -> None:
    launch = Launch(seq=1, ranks=(0,), timeout_s=WAIT_S)
    communicator.launch(launch, (Kernel(kind=OpKind.BARRIER),))


@fault_in("raycollect-helper")
def test_who_waits_for_a_communicator_of_nccl_gets_its_error() -> None:
    with gpus(1) as fake:
        maker = fake.cupy.cuda.nccl
        refused = pytest.raises(BackendUnavailableError, match="injected")
        with fail_at(maker, "NcclCommunicator", thread="raycollect-helper"), refused:
            create(0, 1)
        made = create(0, 1)
        run_barrier(made)
        made.close()


@fault_in("raycollect-timer")
def test_the_guard_of_nccl_looks_again() -> None:
    with alone_on_a_gpu() as (made, _), fail_at(nccl.NcclCommunicator, "_look", thread="raycollect-timer"):
        run_barrier(made)
    with alone_on_a_gpu() as (made, _):
        looked = threading.Event()
        made._look = lambda: looked.set() or True
        assert looked.wait(WAIT_S)
        run_barrier(made)
