"""Two runtimes in one process: each is like a process of its own, and they share groups as processes do."""

from __future__ import annotations

import os
import re
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from queue import SimpleQueue
from typing import Any

import numpy as np
import pytest

import raycollect
from raycollect import backends
from raycollect.backends.capabilities import Capabilities
from raycollect.channel import ControlLink, Hub
from raycollect.channel.messages import (
    Abort,
    Done,
    Gone,
    Join,
    Joined,
    Leave,
    Measure,
    Measured,
    Meet,
    Message,
    Order,
    Publish,
    Survey,
    Surveyed,
    Welcome,
)
from raycollect.core.model import GroupSpec, Member
from raycollect.core.protocols import Joining
from raycollect.errors import ChannelError, CollectiveTimeoutError, PlanAbortedError, from_wire
from raycollect.group.bootstrap_store import DirectoryBulletin
from raycollect.group.coordinator import Coordinator
from raycollect.group.membership import membership_of
from raycollect.member import init
from raycollect.member import operations as col
from raycollect.member.participant import Participant
from raycollect.member.runtime import Runtime, this_runtime
from raycollect.planner import Membership, Ticket, encode_order, encode_program
from tests.pure.driver.tracked_plans import asked, flying, key_of
from tests.pure.fleet import contain
from tests.pure.participants import participant

WAIT_S = 20.0


@pytest.fixture
def ranks() -> Iterator[list[Runtime]]:
    yield (made := [Runtime(), Runtime()])
    for one in made:
        for process_group in one.process_groups.all():
            process_group.close()
        one.process_groups.hub.close()


def at_once(ranks: list[Runtime], call: Callable[[int], Any]) -> list[Any]:
    """Makes a call in each runtime, by its rank, at the same time."""

    def make(rank: int) -> Any:
        with ranks[rank].entered():
            return call(rank)

    with ThreadPoolExecutor(len(ranks)) as workers:
        return [one.result(WAIT_S) for one in [workers.submit(make, rank) for rank in range(len(ranks))]]


# ---------------------------------------------------------------------------------------------- members' calls


@pytest.mark.parametrize("backend", ["shm", "tcp"])
def test_members_in_one_process_call_each_other(ranks: list[Runtime], tmp_path: Path, backend: str) -> None:
    tmp_path.chmod(0o700)
    where = f"file://{tmp_path}"
    at_once(ranks, lambda rank: init.init_collective_group(2, rank, backend, "g", rendezvous=where))
    assert not init.is_group_initialized("g"), "which is no group of the process's own"
    ring = ranks[0].tracer.begin("a test")
    assert ring is not None
    tensors = [np.full(3, rank + 1.0) for rank in range(2)]
    for work in at_once(ranks, lambda rank: col.allreduce(tensors[rank], "g", async_op=True)):
        work.wait()
    assert [one.tolist() for one in tensors] == [[3.0] * 3] * 2
    assert "allreduce" in {span.name for span in ring.read().spans}
    assert ranks[1].tracer.ring is None, "what one records is nobody else's"
    assert at_once(ranks, lambda rank: init.get_rank("g")) == [0, 1]
    at_once(ranks, lambda rank: init.destroy_collective_group("g"))


def test_a_forked_child_begins_with_a_runtime_of_its_own() -> None:
    mine = this_runtime()
    child = os.fork()
    if not child:  # nothing of pytest may run there
        os._exit(int(this_runtime() is mine or this_runtime() is not this_runtime()))
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert this_runtime() is mine


ENTRIES = {
    "driver/controller.py",
    "driver/timeline.py",
    "live_view/view.py",
    "member/call.py",
    "member/init.py",
    "member/mixin.py",
    "member/participant.py",
    "member/runtime.py",
    "ray_plugins/tensor_transport.py",
    "testing.py",
    "weights/agent.py",
    "weights/side.py",
}
"""What Ray, or a user, calls: from there on the runtime is passed. This may only shrink."""


def test_only_what_ray_or_a_user_calls_looks_for_the_runtime() -> None:
    home = Path(raycollect.__file__).parent
    texts = {path.relative_to(home).as_posix(): path.read_text() for path in home.rglob("*.py")}
    assert {name for name, text in texts.items() if re.search(r"\bthis_(runtime|participant)\(", text)} <= ENTRIES


# ---------------------------------------------------------------------------------------------- plans


class Driver:
    """A controller of participants: connects to them, and lets them meet."""

    def __init__(self, hub: Hub, participants: list[Participant], backend: str) -> None:
        infos = [one.describe(ordered=True) for one in participants]
        members = tuple(Member(rank=rank, **info) for rank, info in enumerate(infos))
        spec = GroupSpec(name="g", group_id="id of g", backend=backend, world_size=len(members))
        self.group: Membership = membership_of(spec, members)
        self.coordinator = Coordinator(spec.group_id, spec.world_size)
        self.told: list[SimpleQueue[Any]] = [SimpleQueue() for _ in participants]
        self.ends: SimpleQueue[tuple[int, Done]] = SimpleQueue()
        self._lock = threading.Lock()
        self._hub = hub
        self.links: list[ControlLink] = [self.connect(rank) for rank in range(len(members))]

    def connect(self, rank: int) -> ControlLink:
        """Leases a participant."""
        hello = {"controller": "me", "description": "a test"}
        link = self._hub.connect(self.group.members[rank].address, hello, _End(self, rank), WAIT_S)
        self.hear(rank, Welcome)
        return link

    def join(self) -> None:
        for rank, link in enumerate(self.links):
            link.send(Join(request=1, group=self.group.spec, rank=rank, members=list(self.group.members)))
        assert [self.hear(rank, Joined).error for rank in range(len(self.links))] == [None] * len(self.links)

    def hear(self, rank: int, *kinds: type) -> Any:
        while not isinstance(one := self.told[rank].get(timeout=WAIT_S), kinds):
            pass
        return one

    def wait_for_end(self, seq: int) -> None:
        """Waits until a plan has ended well on all ranks, of which one may tell for others."""
        missing = set(range(len(self.links)))
        while missing:
            rank, done = self.ends.get(timeout=WAIT_S)
            assert (done.seq, done.error) == (seq, None)
            missing.difference_update(done.ranks or [rank])

    def wait_for_begin(self, seq: int, rank: int) -> None:
        """Waits until a plan has its turn on a rank."""
        has_begun = False
        while not has_begun:
            self.links[rank].send(Measure(request=1, seq=seq))
            has_begun = self.hear(rank, Measured).has_begun

    def error(self, seq: int, rank: int) -> Any:
        """The error with which a plan has ended on a rank."""
        teller, done = self.ends.get(timeout=WAIT_S)
        assert (teller, done.seq) == (rank, seq)
        return from_wire(done.error)

    def send_plan(self, seq: int, rank: int) -> None:
        plan = flying(asked(self.group, (0, 1))).plan
        position = plan.positions[self.group.members[rank].actor_id]
        payload = encode_order(Ticket(seq, seq - 1), [key_of(0)], encode_program(plan.program(position)))
        self.links[rank].send(Order(payload=payload, in_order=True, after=b""))

    def received(self, rank: int, message: Any) -> None:
        if isinstance(message, Done):
            self.ends.put((rank, message))
        else:
            self.told[rank].put(message)
        if isinstance(message, Meet | Publish):
            with self._lock:
                for to, answer in self.coordinator.receive(rank, message):
                    self.links[to].send(answer)


class _End:
    """The driver's end of one connection."""

    def __init__(self, driver: Driver, rank: int) -> None:
        self.driver, self.rank = driver, rank

    def received(self, link: ControlLink, message: Message) -> None:
        self.driver.received(self.rank, message)

    def closed(self, link: ControlLink, reason: ChannelError) -> None:
        self.driver.told[self.rank].put(reason)


@pytest.fixture
def driver() -> Iterator[Callable[[str], tuple[Driver, list[Participant]]]]:
    """Makes two participants, each with a runtime of its own, that a controller drives."""
    hub, made = Hub(), [participant(0), participant(1)]

    def make(backend: str) -> tuple[Driver, list[Participant]]:
        for rank, one in enumerate(made):
            one.store.put(key_of(0), contain(np.full(3, rank + 1.0)))
        return Driver(hub, made, backend), made

    yield make
    hub.close()
    for one in made:
        one.close()


@pytest.mark.parametrize("backend", ["shm", "tcp"])
def test_participants_in_one_process_run_a_plan(
    driver: Callable[[str], tuple[Driver, list[Participant]]], backend: str
) -> None:
    drives, made = driver(backend)
    drives.join()
    for rank in range(2):
        drives.send_plan(1, rank)
    drives.wait_for_end(1)
    assert [one.store.current(key_of(0)).value.tolist() for one in made] == [[3.0] * 3] * 2
    assert this_runtime().process_groups.by_id == {}


def test_a_plan_that_waits_for_a_method_of_another_process_ends_in_time_and_what_follows_goes_on(
    driver: Callable[[str], tuple[Driver, list[Participant]]],
) -> None:
    """The method ends when it likes. Its plan is aborted; the next runs after it, and the lease ends without it."""
    drives, made = driver("tcp")
    drives.join()
    with made[0].methods.lock:
        drives.send_plan(1, 0)
        drives.wait_for_begin(1, 0)
        drives.links[0].send(Abort(seq=1, reason="it took too long"))
        error = drives.error(1, 0)
        assert isinstance(error, PlanAbortedError)
        assert error.detail == "it took too long"
        drives.links[1].send(Abort(seq=1, reason="it took too long"))
        drives.send_plan(1, 1)
        assert isinstance(drives.error(1, 1), PlanAbortedError)
        for rank in range(2):
            drives.send_plan(2, rank)
    drives.wait_for_end(2)
    with made[0].methods.lock:
        drives.send_plan(3, 0)
        drives.wait_for_begin(3, 0)
        drives.links[0].close()
        drives.connect(0)


class Slow:
    """A communicator that takes its time to close."""

    world_size = 2

    def __init__(self, rank: int, gate: Gate) -> None:
        self.rank, self.gate = rank, gate

    def lost(self, rank: int) -> None:
        """Sees that by itself."""

    def abort(self, seq: int) -> None:
        """Nothing runs."""

    def close(self) -> None:
        self.gate.wait()


class Gate:
    """What somebody waits at until a test opens it."""

    def __init__(self) -> None:
        self.came, self.may_go, self.gone = threading.Event(), threading.Event(), threading.Event()

    def wait(self) -> None:
        self.came.set()
        assert self.may_go.wait(WAIT_S)
        self.gone.set()

    def check_waits(self) -> None:
        """Somebody waits; lets that go on."""
        assert self.came.wait(WAIT_S)
        assert not self.gone.is_set()
        self.may_go.set()
        assert self.gone.wait(WAIT_S)


@pytest.fixture
def gate() -> Gate:
    return Gate()


@pytest.fixture
def slow(gate: Gate) -> Iterator[str]:
    """The name of a backend of them."""
    name = "slow-to-close"

    def make(joining: Joining) -> Any:
        return Slow(joining.rank, gate)

    backends.register(Capabilities(name=name, factory=make, interruptible=True, bitwise=True, cross_host=True))
    yield name
    del backends.BACKENDS[name]


@pytest.mark.parametrize("has_calls", [False, True])
@pytest.mark.parametrize(
    "ends",
    [Leave(group_id="id of g"), Gone(group_id="id of g", rank=1, died=True, detail="killed")],
    ids=str,
)
def test_a_backend_that_takes_its_time_to_close_holds_up_no_message(
    driver: Callable[[str], tuple[Driver, list[Participant]]], slow: str, gate: Gate, ends: Message, has_calls: bool
) -> None:
    drives, made = driver(slow)
    drives.join()
    if has_calls:
        at_once([one.runtime for one in made], lambda rank: init.get_group_handle("g").form())
    drives.links[0].send(ends)
    drives.links[0].send(Survey(request=7))
    assert drives.hear(0, Surveyed).request == 7
    gate.check_waits()


class SlowBulletin(DirectoryBulletin):
    """A rendezvous that takes its time to take back where rank 0 was."""

    def __init__(self, path: Path, gate: Gate) -> None:
        super().__init__(path)
        self.gate = gate

    def remove(self, name: str) -> None:
        self.gate.wait()
        super().remove(name)


def test_the_end_of_a_group_that_could_not_be_formed_holds_up_no_declared_one(
    driver: Callable[[str], tuple[Driver, list[Participant]]], tmp_path: Path, gate: Gate
) -> None:
    tmp_path.chmod(0o700)
    drives, made = driver("tcp")
    with made[0].runtime.entered(), pytest.raises(CollectiveTimeoutError):
        init.init_collective_group(2, 0, "tcp", "g", 100, rendezvous=SlowBulletin(tmp_path, gate))
    with made[1].runtime.entered(), pytest.raises(CollectiveTimeoutError):  # told, so that rank 0 takes its place back
        init.init_collective_group(2, 1, "tcp", "g", 60_000, rendezvous=DirectoryBulletin(tmp_path))
    assert gate.came.wait(WAIT_S)
    drives.join()
    gate.may_go.set()
