"""Each thread of the library outlives what it calls: a fault in each, one by one, after which all goes on.

Those that there are only with Ray are in `tests/faults/test_thread_faults.py`.
"""

from __future__ import annotations

import ast
import re
import socket
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from queue import SimpleQueue
from types import SimpleNamespace
from typing import Any, TypeVar, cast

import numpy as np
import pytest

import raycollect
from raycollect.backends.nccl import communicator as nccl
from raycollect.channel import DataClient, Hub, Server
from raycollect.channel.messages import (
    Collect,
    Collected,
    Done,
    Fetch,
    Fetched,
    Joined,
    Message,
    Order,
    Publish,
    Unable,
)
from raycollect.channel.packing import pack, unpack
from raycollect.core import direct_transport, ray_internals
from raycollect.core.model import GroupSpec, Kernel, Key, Launch, OpKind
from raycollect.core.submitted_calls import SubmittedCalls
from raycollect.driver import lent_tokens
from raycollect.driver.lent_tokens import LentTokens
from raycollect.engine.execution import Outcome
from raycollect.engine.value_codec import pack_values
from raycollect.errors import BackendUnavailableError, ConnectionLostError, InternalError, from_wire
from raycollect.group import cluster_registry, watchdog
from raycollect.group.bootstrap import BootstrapRequest, follow, lead
from raycollect.group.bootstrap_store import DirectoryBulletin
from raycollect.group.communicator_init import CommunicatorInit
from raycollect.group.coordinator import Coordinator
from raycollect.group.coordinator_server import CoordinatorServer
from raycollect.group.member_communicator import MemberCommunicator
from raycollect.group.process_group import ProcessGroup
from raycollect.member import token_lenders
from raycollect.member.finished_calls import FinishedCalls
from raycollect.member.joined_group import JoinedGroup
from raycollect.member.lease import Lease
from raycollect.member.plan_queue import PlanQueue
from raycollect.member.sequencer import PlanSequencer
from raycollect.member.token_lenders import TokenLenders
from raycollect.member.wait_monitor import WaitMonitor
from raycollect.observe import Recorder, Ring, Tracer, metrics
from raycollect.observe.metrics import Publisher
from raycollect.planner import Ticket
from raycollect.pos import Store, ref_tokens
from raycollect.pos.fetch import serve
from raycollect.pos.ref_tokens import RefTokenPool
from tests.faults import test_thread_faults as with_ray
from tests.faults.inject import fail_at
from tests.pure.backends.test_nccl_join import create
from tests.pure.channel.test_sockets import HOST, SECRET, Party, Rig, echo, rig
from tests.pure.fleet import contain
from tests.pure.group.test_member_communicator import Table, assert_set, start_calls, table
from tests.pure.group.test_watchdog import HERE, Desk, said
from tests.pure.member.step_bench import FakePost, bench
from tests.pure.member.test_lease import _join, _plan, premises
from tests.pure.observe.test_timeline_session import LABEL, Numbers
from tests.pure.on_gpu import gpus

__all__ = ["bench", "premises", "rig", "table"]  # fixtures

_Message = TypeVar("_Message", bound=Message)

WAIT_S = 20.0
BOOM = "TypeError: injected on"

TESTED: set[str] = set()
"""The threads, by the names of the table in ARCHITECTURE.md, whose faults are tested here."""


def fault_in(*names: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Notes which threads a test is about."""
    TESTED.update(names)
    return lambda test: test


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
            if called in ("threads.start", "threads.later", "threads.pool", "Loop"):
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
    """Commands wait for their threads, and `observe` calls a value so."""
    return path.name == "threads.py" or bool({"bench", "doctor", "observe"} & set(path.parts))


def test_each_thread_of_the_package_is_in_the_table_and_has_a_fault() -> None:
    names, nameless = in_the_source()
    assert nameless == [], "threads are started by `raycollect.core.threads`, with a name that can be read here"
    assert in_the_table() == names
    assert set(with_ray.TESTED) | TESTED == names


# ---------------------------------------------------------------------------------------------- the channel


@fault_in("raycollect-server", "raycollect-hub")
@pytest.mark.parametrize(("thread", "at_server"), [("raycollect-server", True), ("raycollect-hub", False)])
def test_an_end_that_fails_tells_the_other_why(rig: Rig, thread: str, at_server: bool) -> None:
    """What the handler does not know how to go on from ends the connection; others come and go."""
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
    request = Fetch(key=key, timeout_s=1.0, domain="")
    try:
        with fail_at(store, "look", thread="raycollect-data-"):
            answer: Any = client.request(request)
        assert str(from_wire(answer.error)).startswith(f"answering Fetch failed: {BOOM}")
        found = client.request(request)
        assert isinstance(found, Fetched)
        assert found.blob_nbytes == 24
    finally:
        client.close()
        server.close()


# ---------------------------------------------------------------------------------------------- members


@pytest.fixture
def two(tmp_path: Path) -> Iterator[tuple[ProcessGroup, ProcessGroup]]:
    """Two members of a group that they have made themselves, in one process."""
    with members(tmp_path) as made:
        yield made


@contextmanager
def members(path: Path) -> Iterator[tuple[ProcessGroup, ProcessGroup]]:
    bulletin, hub = DirectoryBulletin(path / "bulletin"), Hub()
    spec = GroupSpec(name="g", group_id="", backend="tcp", world_size=2, timeout_s=WAIT_S)
    first, second = (BootstrapRequest(spec=spec, rank=rank, who=f"W{rank}", machine="m") for rank in range(2))
    with ThreadPoolExecutor(2) as pool:
        joined = [pool.submit(lead, first, bulletin, hub, {}), pool.submit(follow, second, bulletin, hub)]
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


def confer(slot: ProcessGroup) -> list[bytes]:
    return list(slot.confer("word", bytes([slot.rank])))


@fault_in("raycollect-hub")
def test_an_answer_that_a_member_can_not_take_in_ends_its_call_and_nothing_else(
    two: tuple[ProcessGroup, ProcessGroup],
) -> None:
    with fail_at(ProcessGroup, "communicator", thread="raycollect-hub"):
        ours, theirs = both(two, confer)
    assert ours == [b"\0", b"\1"]
    assert isinstance(theirs, InternalError)
    assert theirs.detail.startswith(f"taking in Met failed: {BOOM}")
    assert both(two, confer) == [[b"\0", b"\1"]] * 2


@fault_in("raycollect-server")
def test_what_the_hub_of_a_group_can_not_take_in_ends_that_call_for_all(two: tuple[ProcessGroup, ProcessGroup]) -> None:
    with fail_at(Coordinator, "receive", thread="raycollect-server"):
        for error in both(two, confer):
            assert isinstance(error, InternalError)
            assert error.detail.startswith(f"taking in Meet failed: {BOOM}")
    assert both(two, confer) == [[b"\0", b"\1"]] * 2


@fault_in("raycollect-last")
def test_a_launch_goes_on_whose_end_after_a_death_fails(table: Callable[..., Table], monkeypatch: Any) -> None:
    monkeypatch.setattr("raycollect.group.member_communicator.LAST_S", 0.0)
    here = table()
    begun = start_calls(here)
    for call, _ in begun:
        assert_set(call.passed)
    with fail_at(here.made[0], "abort", thread="raycollect-last"):
        here.kill(2)
    for call, done in begun:
        call.go.set()
        done.result(WAIT_S)


@fault_in("raycollect-form")
def test_a_communicator_that_can_not_form_is_formed_at_the_next_call(
    two: tuple[ProcessGroup, ProcessGroup],
) -> None:
    for slot in two:
        slot.communicator("all")._give_up()
    with fail_at(CommunicatorInit, "_create", thread="raycollect-form"):
        errors = both(two, ProcessGroup.form)
    assert {type(error) for error in errors} == {InternalError}
    assert all(error.detail.startswith(f"forming the group failed: {BOOM}") for error in errors)
    assert both(two, ProcessGroup.form) == [None, None]


@fault_in("raycollect-call-...")
def test_a_communicator_s_thread_goes_on_with_the_next_call(two: tuple[ProcessGroup, ProcessGroup]) -> None:
    def start(slot: ProcessGroup) -> Any:
        return slot.communicator("all").start("word", lambda communicator, seq: Outcome(), WAIT_S).result(WAIT_S)

    with fail_at(MemberCommunicator, "_run", thread="raycollect-call-all"):
        error = _outcome(two[0].communicator("all").start("word", lambda communicator, seq: Outcome(), WAIT_S))
    assert isinstance(error, InternalError)
    assert error.detail.startswith(f"a call on communicator all failed: {BOOM}")
    assert {type(one) for one in both(two, start)} == {Outcome}


@fault_in("raycollect-fading")
def test_a_hub_that_fades_ends_whatever_fails() -> None:
    star = CoordinatorServer("127.0.0.1", GroupSpec(name="g", group_id="", backend="tcp", world_size=2), "W0")
    board = SimpleNamespace(retract=lambda: None)
    with fail_at(board, "retract", thread="raycollect-fading"):
        star.fail(InternalError(detail="why"), lambda: board.retract())
        star.end()
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection((star.address.host, star.address.port), WAIT_S)


@fault_in("raycollect-watchdog")
@pytest.mark.parametrize("holder", [watchdog.Watchdog, watchdog])
def test_who_asks_what_a_member_does_hears_of_it_after_a_failure(monkeypatch: pytest.MonkeyPatch, holder: Any) -> None:
    """Where looking fails at all, it is done again; where only the look at the process fails, the answer says so."""
    monkeypatch.setattr(watchdog, "ANSWER_S", 0.01)
    desk, answered = Desk(1), threading.Event()
    desk.the_communicator.call = 0
    desk.on_send = lambda message: answered.set()
    with fail_at(holder, "look" if holder is watchdog.Watchdog else "what_runs", thread="raycollect-watchdog"):
        assert desk.watchdog.received(said("?standing", [1]))
    assert answered.wait(WAIT_S)
    (answer,) = desk.sent
    rank, place, seq, what, _ = unpack(answer.value)
    if holder is watchdog.Watchdog:
        assert (rank, place, seq) == (1, *HERE)
    else:
        assert what.startswith(f"could not look: looking at a communicator failed: {BOOM}")
        assert desk.watchdog.received(said("?standing", [1]))


def test_a_question_that_fails_ends_no_call(two: tuple[ProcessGroup, ProcessGroup]) -> None:
    """A diagnostic does not harm what it looks at."""
    question = Publish(group_id="", lane="all", generation="", name="?standing", value=pack([1]))
    met = threading.Event()

    def waits(communicator: Any, seq: int) -> Any:
        assert met.wait(WAIT_S)
        return Outcome()

    call = two[1].communicator("all").start("word", waits, WAIT_S)
    other = two[0].communicator("all").start("word", waits, WAIT_S)
    with fail_at(watchdog.Watchdog, "received"):
        two[1].received(question)
    met.set()
    assert [_outcome(one) for one in (call, other)] == [Outcome()] * 2


# ---------------------------------------------------------------------------------------------- participants


class Hears:
    """A controller's link."""

    def __init__(self) -> None:
        self.send, self._came = (came := SimpleQueue[Any]()).put, came

    def next(self, kind: type[_Message]) -> _Message:
        """The next message of this kind."""
        while not isinstance(message := self._came.get(timeout=WAIT_S), kind):
            pass
        return message


@pytest.fixture
def leased(premises: Any) -> Iterator[tuple[Lease, Hears]]:
    premises.instruments.recorder = Recorder(time.monotonic)
    heard = Hears()
    made = Lease("me", "a test", cast(Any, heard), premises)
    yield made, heard
    made.end("the test is over")


@fault_in("raycollect-join")
def test_a_join_that_fails_is_told(monkeypatch: pytest.MonkeyPatch, leased: tuple[Lease, Hears]) -> None:
    here, heard = leased
    with fail_at(JoinedGroup, "connect", thread="raycollect-join"):
        here.received(_join())
        joined = heard.next(Joined)
    assert str(from_wire(joined.error or {})).startswith(f"joining group 'g' failed: {BOOM}")
    monkeypatch.setattr(JoinedGroup, "connect", lambda joined_group, probe: None)
    here.received(_join(name="h", group_id="id of h"))
    assert heard.next(Joined) == Joined(request=1, error=None)


@fault_in("raycollect-trace")
def test_a_timeline_that_can_not_be_read_is_told_so(leased: tuple[Lease, Hears]) -> None:
    here, heard = leased
    ring = here._tracer.begin("me", 100)
    assert ring is not None
    try:
        with fail_at(Ring, "read", thread="raycollect-trace"):
            here.received(Collect(request=7, ends=False))
            unable = heard.next(Unable)
        assert (unable.request, unable.detail.partition(BOOM)[0]) == (
            7,
            "could not look: reading what was recorded failed: ",
        )
        here.received(Collect(request=8, ends=True))
        assert heard.next(Collected).payload
    finally:
        Tracer.current().end("me")


@fault_in("raycollect-metrics")
def test_metrics_are_published_again_after_a_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(metrics, "EVERY_S", 0.01)
    ring, meters = Ring(), Numbers()
    publisher = Publisher(ring, dict, meters)
    with fail_at(metrics, "_publish", thread="raycollect-metrics"):
        ring.add(metrics.KERNEL, "allreduce", 1.5, 3.5, 1, LABEL)
    ring.add(metrics.KERNEL, "allreduce", 1.5, 3.5, 2, LABEL)
    publisher.close()
    assert publisher.join(WAIT_S)
    assert list(meters.counted.values()) == [1, 64]


@fault_in("raycollect-watch")
def test_the_next_wait_is_told_of() -> None:
    told, over = threading.Event(), list[str]()
    hub = SimpleNamespace(tell=told.set)
    watch = WaitMonitor(0.01)

    def waiting() -> AbstractContextManager[None]:
        return watch.waiting(lambda: hub.tell(), lambda: over.append("over"))

    with fail_at(hub, "tell", thread="raycollect-watch") as fault, waiting():
        assert fault.told.wait(WAIT_S)
    with waiting():
        assert told.wait(WAIT_S)
    assert over == ["over"] * 2


@fault_in("raycollect-tokens")
def test_tokens_are_made_again_after_a_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    made = threading.Semaphore(0)
    ray = SimpleNamespace(put=lambda value: (made.release(), object())[1])
    monkeypatch.setattr(ref_tokens, "ray", ray)
    monkeypatch.setattr(ray_internals, "on_last_ref", lambda ref, callback: True)
    pool = RefTokenPool(lambda key: None, size=8)
    with fail_at(ray, "put", thread="raycollect-tokens"):
        assert pool.take(Key(bytes(28))) is not None
    for _ in range(9):  # the first, and as many as are kept ready
        assert made.acquire(timeout=WAIT_S)


@fault_in("raycollect-orphans")
def test_an_owner_is_looked_for_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(token_lenders, "LOOK_S", 0.001)
    key, store, freed = Key(bytes(28)), Store(), threading.Event()
    monkeypatch.setattr(store, "free", lambda keys: freed.set())
    owner = SimpleNamespace(is_alive=lambda: not fault.told.is_set())
    lenders = TokenLenders(store)
    lenders.open(b"owner")
    store.put(key, contain(np.ones(2)))
    assert lenders.note(b"owner", key)
    with fail_at(owner, "is_alive", thread="raycollect-orphans") as fault:
        lenders.close(b"owner", lambda: owner.is_alive())
        assert freed.wait(WAIT_S)
    assert not lenders.note(b"owner", key)


@fault_in("raycollect-unused")
def test_what_is_unused_is_told_without_the_connection(monkeypatch: pytest.MonkeyPatch) -> None:
    told: SimpleQueue[list[Key]] = SimpleQueue()
    data = SimpleNamespace(free=lambda address, keys, **_: told.put(keys))
    monkeypatch.setattr(lent_tokens, "fetch", data)
    info = {"address": None, "actor": "Worker(1)", "incarnation": ""}
    task = SimpleNamespace(remote=lambda count: [])
    actor = type("Handle", (), {})()
    vars(actor).update(_ray_method_signatures={}, _raycollect_tokens=SimpleNamespace(options=lambda **_: task))

    def send(message: Message) -> None:
        raise ConnectionLostError(detail="it was cut")

    link = cast(Any, SimpleNamespace(send=send))
    made = LentTokens(SubmittedCalls(), actor, info, link, owner=b"", methods=frozenset(), soon=lambda call: True)
    with fail_at(data, "free", thread="raycollect-unused") as fault:
        made._tell([Key(b"1")])
        assert fault.told.wait(WAIT_S)
    made._tell([Key(b"2")])
    assert told.get(timeout=WAIT_S) == [Key(b"2")]


@fault_in("raycollect-order")
def test_the_next_order_is_carried_out(premises: Any) -> None:
    done = threading.Event()
    desk = SimpleNamespace(run=lambda order: done.set())
    made = PlanQueue(Store(), PlanSequencer(), cast(Any, None), FinishedCalls(), threading.Lock())
    order = Order(payload=_plan(Ticket(seq=1, predecessor=0)), together=False, in_order=False, after=b"")
    with fail_at(desk, "run", thread="raycollect-order"):
        made.received(order, lambda order: desk.run(order))
    made.received(order, lambda order: desk.run(order))
    assert done.wait(WAIT_S)
    made.close()


@fault_in("raycollect-order")
def test_of_an_order_that_fails_the_controller_hears(leased: tuple[Lease, Hears]) -> None:
    here, heard = leased
    with fail_at(Lease, "run_program", thread="raycollect-order"):
        here.received(Order(payload=_plan(Ticket(seq=1, predecessor=0)), together=False, in_order=False, after=b""))
        done = heard.next(Done)
    assert done.seq == 1
    assert str(from_wire(done.error or {})).startswith(f"carrying out an order failed: {BOOM}")
    assert here._sequencer.has_ended(1), "what comes after it goes on"


@fault_in("raycollect-capture")
def test_the_next_run_of_a_captured_step_is_refused_and_its_thread_goes_on(bench: Any) -> None:
    """Of a run that failed nobody knows what it has done, so that the step is broken; another step is not."""
    one, other = bench(), bench()
    with fail_at(one.captured, "_run", thread="raycollect-capture"):
        one.run(1, 0, "x")
        one.heard(1)
    assert one.failed[1].detail.startswith(f"run 1 of a captured step failed: {BOOM}")
    one.run(2, 1, "x")
    one.heard(2)
    assert "failed before" in one.failed[2].detail
    other.run(1, 0, "x")
    other.heard(1)
    assert other.ran == {1: ("x",)}


@fault_in("raycollect-capture")
def test_a_doorbell_that_fails_is_looked_at_again(bench: Any) -> None:
    post = FakePost()
    post.wake()
    one = bench(post=post)
    with fail_at(post, "take", thread="raycollect-capture"):
        post.wake()
    assert one.answered(post.ring(1, 0, pack_values(["x"]))) == ("x",)


# ---------------------------------------------------------------------------------------------- the driver


@fault_in("raycollect-post")
def test_the_next_record_is_posted() -> None:
    put = SimpleQueue[bytes]()
    client = SimpleNamespace(internal_kv_put=lambda key, *_, **__: put.put(key))
    membership: Any = SimpleNamespace(spec=SimpleNamespace(name="g", group_id="id of g"))
    with fail_at(client, "internal_kv_put", thread="raycollect-post"):
        cluster_registry._soon(cluster_registry._put, client, membership, b"record")
    cluster_registry._soon(cluster_registry._put, client, membership, b"record")
    assert put.get(timeout=WAIT_S).endswith(b"id of g")


@fault_in("raycollect-direct")
def test_who_waits_for_a_ref_that_ray_moves_hears_of_a_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    came = SimpleQueue[Any]()
    caller = SimpleNamespace(heard=came.put)
    monkeypatch.setattr(direct_transport, "is_direct", lambda ref: True)
    monkeypatch.setattr(direct_transport, "get", lambda ref: "the value")

    def wait() -> None:
        direct_transport.on_completed(object(), lambda value: caller.heard(value))

    with fail_at(direct_transport, "get", thread="raycollect-direct"):
        wait()
        assert str(came.get(timeout=WAIT_S)).startswith(f"waiting for a ref failed: {BOOM}")
    with fail_at(caller, "heard", thread="raycollect-direct"):
        wait()
    wait()
    assert came.get(timeout=WAIT_S) == "the value"


# ---------------------------------------------------------------------------------------------- backends


@fault_in("raycollect-torch")
def test_who_waits_for_a_call_of_torch_gets_its_error() -> None:
    pytest.importorskip("torch")
    from raycollect.backends.torch_dist.calls import Calls

    launch = Launch(seq=1, ranks=(0,), timeout_s=WAIT_S)
    library: Any = SimpleNamespace(backend=None, rank=0, world_size=1, group_name="g")
    calls = Calls(library, launch, lambda launch: None)
    work = SimpleNamespace(wait=lambda timeout: True)
    with fail_at(work, "wait", thread="raycollect-torch"), pytest.raises(TypeError, match="injected"):
        calls._wait_beside(work)
    calls._wait_beside(work)


@contextmanager
def alone_on_a_gpu() -> Iterator[tuple[Any, Any]]:
    """A rank by itself, on the fake of cupy; and the fake."""
    with gpus(1) as fake:
        made = create(0, 1)
        try:
            yield made, fake
        finally:
            made.close()


def run_barrier(communicator: Any) -> None:
    launch = Launch(seq=1, ranks=(0,), timeout_s=WAIT_S)
    communicator.launch(launch, Kernel(kind=OpKind.BARRIER)).wait(WAIT_S)


@fault_in("raycollect-nccl")
def test_who_waits_for_a_communicator_of_nccl_gets_its_error() -> None:
    with gpus(1) as fake:
        maker = fake.cupy.cuda.nccl
        refused = pytest.raises(BackendUnavailableError, match="injected")
        with fail_at(maker, "NcclCommunicator", thread="raycollect-nccl"), refused:
            create(0, 1)
        made = create(0, 1)
        run_barrier(made)
        made.close()


@fault_in("raycollect-nccl-guard")
def test_the_guard_of_nccl_looks_again() -> None:
    with alone_on_a_gpu() as (made, _), fail_at(nccl.NcclCommunicator, "_look", thread="raycollect-nccl-guard"):
        run_barrier(made)
    with alone_on_a_gpu() as (made, _):
        looked = threading.Event()
        made._look = lambda: looked.set() or True
        assert looked.wait(WAIT_S)
        run_barrier(made)


@fault_in("raycollect-nccl-abort")
def test_an_abort_of_nccl_that_fails_harms_no_other_group() -> None:
    with alone_on_a_gpu() as (made, _), fail_at(made._nccl, "abort", thread="raycollect-nccl-abort"):
        made._end_aside()
    with alone_on_a_gpu() as (made, _):
        run_barrier(made)
