"""Each thread of the library outlives what it calls: a fault in each, one by one, after which all goes on.

The one that only Ray's actors have is in `tests/faults/test_thread_faults.py`.
"""

from __future__ import annotations

import ast
import re
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager
from pathlib import Path
from queue import SimpleQueue
from types import SimpleNamespace
from typing import Any, cast
from urllib.error import HTTPError
from urllib.request import urlopen

import numpy as np
import pytest

import raycollect
from raycollect.backends import arrays
from raycollect.channel import DataClient, Hub, Server
from raycollect.channel.messages import Done, Fetch, Fetched, Joined, Order
from raycollect.core import threads
from raycollect.core.model import GroupSpec, Key
from raycollect.engine.run import Outcome
from raycollect.engine.value_codec import pack_values
from raycollect.errors import InternalError, PlanAbortedError, from_wire
from raycollect.group import cluster_registry, communicator_init
from raycollect.group.bootstrap import BootstrapRequest, Introduction, follow, lead
from raycollect.group.bootstrap_store import DirectoryBulletin
from raycollect.group.communicator import GroupCommunicator
from raycollect.group.member_communicator import MemberCommunicator
from raycollect.group.process_group import ProcessGroup
from raycollect.live_view.frame import Frame
from raycollect.live_view.server import PageServer
from raycollect.member.lease import Lease
from raycollect.member.participant import Participant
from raycollect.member.wait_monitor import WaitMonitor
from raycollect.planner import Ticket
from raycollect.planner.layout import layout
from raycollect.pos import Container, Store
from raycollect.pos.fetch import serve
from raycollect.weights import atoms, reads
from raycollect.weights.protocol import Atom, Version
from raycollect.weights.reads import Arrived
from raycollect.weights.source import Source
from tests.pure.channel.parties import HOST, SECRET, Party, Rig, echo, rig
from tests.pure.fleet import contain
from tests.pure.member.leases import Heard, backend, join, plan, premises
from tests.pure.member.leases import leased as lease_of
from tests.pure.member.step_bench import FakePost, bench
from tests.pure.participants import participant
from tests.pure.thread_faults import BOOM, WAIT_S, Failing, fail_at

__all__ = ["backend", "bench", "premises", "rig"]  # fixtures

# ---------------------------------------------------------------------------------------------- the table


def in_the_table() -> tuple[set[str], int]:
    """The threads in the table of ARCHITECTURE.md, and from how many places it says that they are started."""
    text = (Path(raycollect.__file__).parent.parent / "ARCHITECTURE.md").read_text()
    table = text.partition("## Processes, threads, connections")[2].partition("| connection |")[0]
    places = re.search(r"^\| places that start threads \| (\d+) \|", text, re.MULTILINE)
    assert places is not None
    return set(re.findall(r"^\|[^|]*\| `(raycollect-[a-z.-]+)` \|", table, re.MULTILINE)), int(places[1])


def in_the_source() -> tuple[set[str], int, list[str]]:
    """What threads the package starts, by the name that each call gives; from how many places; and calls without one.

    All calls by `threads.call_in_helper` are one place.
    """
    names, nameless, places = {"raycollect-helper"}, [], 1
    for path in Path(raycollect.__file__).parent.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            called = ast.unparse(node.func) if isinstance(node, ast.Call) else ""
            places += called in ("threads.start", "threads.pool")
            if called in ("threads.start", "threads.pool", "threads.beside", "Loop"):
                first = cast(ast.Call, node).args[0]
                if called == "threads.start" and path.name == "loop.py":
                    continue  # its name is given to `Loop`
                text = next((one.value for one in ast.walk(first) if isinstance(one, ast.Constant)), None)
                nameless += [] if text else [f"{path.name}:{first.lineno}"]
                names.add(f"{text}{'...' if isinstance(first, ast.JoinedStr) else ''}")
            elif called.removeprefix("threading.") in ("Thread", "ThreadPoolExecutor") and path.name != "threads.py":
                nameless.append(f"{path.name}:{cast(ast.Call, node).lineno}")
    return names, places, nameless


def test_each_thread_of_the_package_is_in_the_table_and_has_a_fault() -> None:
    names, places, nameless = in_the_source()
    assert nameless == [], "threads are started by `raycollect.core.threads`, with a name that can be read here"
    assert in_the_table() == (names, places)
    of_actors = Path(raycollect.__file__).parents[1] / "tests/faults/test_thread_faults.py"
    tested = re.findall(r'"(raycollect-[a-z-]+)"', Path(__file__).read_text() + of_actors.read_text())
    assert {name.removesuffix("...") for name in names} <= set(tested)


# ---------------------------------------------------------------------------------------------- the channel


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


def test_a_frame_of_the_live_view_that_fails_is_answered_and_the_next_one_too() -> None:
    frames = iter([RuntimeError(BOOM), Frame(at_s=0, host="", pid=1, program="", groups=(), operations=(), missing=())])

    def take() -> Frame:
        frame = next(frames)
        if isinstance(frame, RuntimeError):
            raise frame
        return frame

    server = PageServer(take, dict, 0)
    assert "raycollect-live" in {thread.name for thread in threading.enumerate()}
    try:
        with pytest.raises(HTTPError) as failed:
            urlopen(server.link + "frame.json", timeout=WAIT_S)
        failed.value.close()
        assert failed.value.code == 500
        with urlopen(server.link + "frame.json", timeout=WAIT_S) as answer:
            assert answer.status == 200
    finally:
        server.close()


def test_a_copy_of_a_version_that_fails_is_an_error_of_the_put_and_the_next_put_works() -> None:
    here = participant()
    layouts = {name: layout([3 << 20], mesh={"rank": 1}, dtype="float32") for name in "ab"}  # enough for two threads
    among = atoms.cut(layouts, [])
    held = {name: np.ones(3 << 20, np.float32) for name in layouts}
    src = Source(here, Container.of(held, arrays.is_tensor), layouts, 0)
    failing = Failing("raycollect-copy")
    src._side.box = failing.wrap(src._side.box)
    version = Version(1, 1, cut=among, count=1)
    with pytest.raises(TypeError, match="injected"):
        src.seal(version, among, b"1")
    assert failing.consumed.is_set()
    _, digests = src.seal(version, among, b"2")
    assert set(digests) == set(among.atoms)
    here.close()


def test_a_read_of_deltas_that_fails_is_an_error_of_the_update_and_the_next_one_works() -> None:
    failing, requests = Failing("raycollect-read"), [[("a", ((at,), (at + 1,)))] for at in range(8)]

    def get(some: list[Atom]) -> Arrived:
        failing.consumed.wait(WAIT_S)
        return Arrived({}, {some[0]: b""}, 0)

    with pytest.raises(TypeError, match="injected"):
        reads.in_threads(failing.wrap(get), requests)
    assert failing.consumed.is_set()
    assert sum(len(some.landed) for some in reads.in_threads(failing.wrap(get), requests)) == len(requests)


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


def test_the_next_record_is_posted_after_a_failure() -> None:
    put = SimpleQueue[bytes]()
    store = SimpleNamespace(put=put.put)
    membership: Any = SimpleNamespace(spec=SimpleNamespace(name="g", group_id="id of g"))
    with fail_at(store, "put", thread="raycollect-post"):
        cluster_registry._soon(membership, lambda key: store.put(key))
    cluster_registry._soon(membership, lambda key: store.put(key))
    assert put.get(timeout=WAIT_S).endswith(b"id of g")


# ---------------------------------------------------------------------------------------------- members


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


@pytest.fixture
def two(tmp_path: Path) -> Iterator[tuple[ProcessGroup, ProcessGroup]]:
    """Two members of a group that they have made themselves, in one process."""
    bulletin, hub = DirectoryBulletin(tmp_path / "bulletin"), Hub()
    spec = GroupSpec(name="g", group_id="", backend="tcp", world_size=2, timeout_s=WAIT_S)
    first, second = (BootstrapRequest(spec=spec, rank=rank, me=Introduction(f"W{rank}", "m")) for rank in range(2))
    with ThreadPoolExecutor(2) as pool:
        joined = [pool.submit(lead, first, bulletin, {}), pool.submit(follow, second, bulletin, hub)]
        slots = joined[0].result(WAIT_S), joined[1].result(WAIT_S)
    try:
        yield slots
    finally:
        for slot in slots:
            slot.close()
        hub.close()


def both(slots: tuple[ProcessGroup, ProcessGroup], call: Callable[[ProcessGroup], Any]) -> list[Any]:
    """What two members get who do the same at once."""
    with ThreadPoolExecutor(2) as pool:
        return [_outcome(one) for one in [pool.submit(call, slot) for slot in slots]]


def _outcome(future: Future[Any]) -> Any:
    error = future.exception(WAIT_S)
    return future.result() if error is None else error


def test_a_communicator_that_can_not_form_is_formed_at_the_next_call(
    two: tuple[ProcessGroup, ProcessGroup],
) -> None:
    for slot in two:
        slot.communicator("all")._leave()
    with fail_at(communicator_init, "make_communicator", thread="raycollect-helper"):
        errors = both(two, ProcessGroup.form)
    assert {type(error) for error in errors} == {InternalError}
    assert all(error.detail.startswith(f"forming the group failed: {BOOM}") for error in errors)
    assert both(two, ProcessGroup.form) == [None, None]


def test_the_thread_of_a_communicator_goes_on_with_the_next_call(two: tuple[ProcessGroup, ProcessGroup]) -> None:
    def start(slot: ProcessGroup) -> Any:
        return slot.communicator("all").start("word", lambda communicator, seq: Outcome(), WAIT_S).result(WAIT_S)

    with fail_at(MemberCommunicator, "_run", thread="raycollect-call-"):
        error = _outcome(two[0].communicator("all").start("word", lambda communicator, seq: Outcome(), WAIT_S))
    assert isinstance(error, InternalError)
    assert error.detail.startswith(f"a call on communicator all failed: {BOOM}")
    assert {type(one) for one in both(two, start)} == {Outcome}


# ---------------------------------------------------------------------------------------------- participants


@pytest.fixture
def leased(premises: Participant) -> tuple[Lease, Heard]:
    return lease_of(premises)


def test_a_join_that_fails_is_told(leased: tuple[Lease, Heard]) -> None:
    here, heard = leased
    with fail_at(GroupCommunicator, "connect", thread="raycollect-helper"):
        here.received(join())
        joined = heard.next(Joined)
    assert str(from_wire(joined.error or {})).startswith(f"joining group 'g' failed: {BOOM}")
    here.received(join(name="h", group_id="id of h"))
    assert heard.next(Joined) == Joined(request=1, error=None)


def test_the_next_wait_is_told_of_after_a_failure() -> None:
    told, over = threading.Event(), list[str]()
    hub = SimpleNamespace(tell=told.set)
    watch = WaitMonitor(0.01)

    def waiting() -> AbstractContextManager[None]:
        return watch.waiting(lambda _: hub.tell(), lambda: over.append("over"))

    with fail_at(hub, "tell", thread="raycollect-timer") as fault, waiting():
        assert fault.told.wait(WAIT_S)
    with waiting():
        assert told.wait(WAIT_S)
    assert over == ["over"] * 2


def test_the_controller_hears_of_an_order_that_fails(leased: tuple[Lease, Heard]) -> None:
    here, heard = leased
    with fail_at(Lease, "_carry_out", thread="raycollect-order"):
        here.received(Order(payload=plan(Ticket(seq=1, predecessor=0)), in_order=False, after=b""))
        done = heard.next(Done)
    assert done.seq == 1
    assert str(from_wire(done.error or {})).startswith(f"carrying out an order failed: {BOOM}")
    assert here._sequencer.has_ended(1), "what comes after it goes on"


def test_a_doorbell_that_fails_is_looked_at_again(bench: Any) -> None:
    post = FakePost()
    post.wake()
    one = bench(post=post)
    with fail_at(post, "take", thread="raycollect-capture"):
        post.wake()
    assert one.answered(post.ring(1, 0, pack_values(["x"]))) == ("x",)
