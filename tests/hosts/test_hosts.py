"""Groups over three hosts with links of their own: what comes out, what the links carry, what faults do.

What is not marked `full` is in `make test`; all of it is `make test-hosts`.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.hosts.cluster import ROOT, Cluster
from tests.hosts.namespaces import HostsError, Namespaces, objection

pytestmark = pytest.mark.timeout(400)


def test_every_way_of_calling_gives_the_same_bits_and_links_carry_the_minimum(play):
    play("bits", "minimum", "links")


def test_a_cut_link_is_named_and_its_group_works_on_once_it_is_whole(play):
    play("link")


@pytest.mark.full
def test_every_call_of_members(play):
    play("calls")


@pytest.mark.full
def test_cuts_of_five_seconds_in_a_kernel_are_not_noticed(play):
    play("host_heals", "link_heals", "one_way_heals")


@pytest.mark.full
def test_a_link_that_is_cut_in_a_kernel_or_in_one_direction_is_named(play):
    play("link_in_plan", "one_way", "one_way_in_plan")


@pytest.mark.full
def test_gloo_names_a_cut_link_too(play):
    play("link_of_gloo")


@pytest.mark.full
def test_a_host_that_is_back_after_25_seconds_takes_part_again(play):
    play("host", "host_in_plan")


@pytest.mark.full
@pytest.mark.parametrize("name", ["host_for_a_minute", "after"])
def test_a_host_that_is_back_after_a_minute_takes_part_again(name):
    """It has a cluster of its own: to Ray, two such cuts in turn are one that lasts too long."""
    _play_alone(name)


@pytest.mark.full
def test_versions_reach_all_hosts_and_a_latecomer_is_served_by_whoever_is_near_or_left(play):
    play("versions")


@pytest.mark.full
def test_an_update_that_is_cut_for_five_seconds_is_whole_or_not_there(play):
    play("versions_cut")


@pytest.mark.full
def test_a_silent_host_is_told_in_time(play):
    play("silent")


@pytest.mark.full
def test_a_raylet_that_is_stopped_for_a_while_holds_up_no_call(play):
    play("paused")


@pytest.mark.full
@pytest.mark.parametrize("name", ["raylet", "versions_raylet", "head"])
def test_what_ray_runs_on_a_host_is_gone(name):
    """It has a cluster of its own, which is not whole again."""
    _play_alone(name)


def _play_alone(name):
    if objection():
        pytest.skip(objection())
    with Cluster(3) as cluster:
        printed = cluster.driver([sys.executable, "-m", "tests.hosts.programs", name])
        assert f"{name}: done" in printed, printed


# ------------------------------------------------------------------------------------------ the tool


@pytest.fixture
def _possible() -> None:
    if objection():
        pytest.skip(objection())


_TALK = """
import socket, sys
with socket.create_connection((sys.argv[1], 7000), 1.0) as sock:
    print(sock.recv(5).decode())
"""
_LISTEN = """
import socket
with socket.create_server(("", 7000)) as server:
    while True:
        sock, _ = server.accept()
        sock.sendall(b"hello")
        sock.close()
"""


def _reaches(hosts: Namespaces, sender: int, receiver: int) -> bool:
    command = hosts.command(sender, [sys.executable, "-c", _TALK, hosts.address(receiver)])
    return "hello" in subprocess.run(command, capture_output=True, text=True, check=False).stdout


@pytest.mark.usefixtures("_possible")
def test_hosts_reach_each_other_by_whole_cables_only():
    with Namespaces(3, rate="") as hosts:
        before = set(_interfaces())
        listening = [subprocess.Popen(hosts.command(host, [sys.executable, "-c", _LISTEN])) for host in hosts.numbers]
        until_s = time.monotonic() + 60
        while not all(_reaches(hosts, 1, host) for host in hosts.numbers):
            assert time.monotonic() < until_s
        hosts.cut_link(1, 2)
        assert not _reaches(hosts, 1, 2)
        assert _reaches(hosts, 1, 3)
        assert _reaches(hosts, 2, 3)
        hosts.heal_link(1, 2)
        assert _reaches(hosts, 1, 2)
        hosts.cut(2)
        assert not _reaches(hosts, 3, 2)
        assert not _reaches(hosts, 2, 1)
        hosts.heal_all()
        assert _reaches(hosts, 2, 1)
        assert set(_interfaces()) == before, "all of it is inside"
        assert min(sent for sent, _ in hosts.counters()) > 0
    for one in listening:
        one.wait(10)


def _interfaces() -> list[str]:
    return [one.name for one in Path("/sys/class/net").iterdir()]


_ASK = """
import socket, sys, time
from raycollect.core import sockets
sock = socket.create_connection((sys.argv[1], 7000))
sockets.tune(sock)
print(sock.recv(5).decode(), flush=True)
sys.stdin.readline()
cut_s = time.monotonic()
time.sleep(9.5)  # the library asks a silent host after ten seconds
assert sockets.count_silence(sock)
sock.setblocking(True)
sock.send(b"question")
try:
    sock.recv(1)
except OSError:
    print(f"{time.monotonic() - cut_s:.1f}")
"""
_HOLD = """
import socket
with socket.create_server(("", 7000)) as server:
    held = []
    while True:
        held.append(server.accept()[0])
        held[-1].sendall(b"hello")
"""


@pytest.mark.full
@pytest.mark.usefixtures("_possible")
def test_a_question_does_not_begin_the_time_of_a_silent_host_anew():
    """Without `count_silence` it takes 19 to 21 s."""
    with Namespaces(2, rate="") as hosts:
        listening = subprocess.Popen(hosts.command(2, [sys.executable, "-c", _HOLD]))
        until_s = time.monotonic() + 60
        while not _reaches(hosts, 1, 2):
            assert time.monotonic() < until_s
        command = hosts.command(1, [sys.executable, "-c", _ASK, hosts.address(2)])
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
        env = {**os.environ, "PYTHONPATH": str(ROOT)}
        with subprocess.Popen(command, env=env, **pipes) as asking:
            assert asking.stdout is not None
            assert asking.stdin is not None
            assert asking.stdout.readline() == "hello\n"
            hosts.cut(2)
            asking.stdin.write("\n")
            asking.stdin.flush()
            assert 9 < float(asking.stdout.readline()) < 16
    listening.wait(10)


_SAY = """
import socket, sys, time
from raycollect.core import sockets
until_s = time.monotonic() + 30
while True:
    try:
        sock = socket.create_connection((sys.argv[1], 7000))
        break
    except OSError:
        assert time.monotonic() < until_s, "nobody listens"
sockets.tune(sock)
print(sock.recv(5).decode(), flush=True)
while not sockets._asked(sock)[1]:  # a probe is lost, and the time since the last answer is at its longest
    time.sleep(0.001)
assert sockets.count_silence(sock)
sock.send(b"question")
print("sent", flush=True)
print(sock.recv(6).decode(), flush=True)
"""
_ANSWER = """
import socket
with socket.create_server(("", 7000)) as server:
    sock = server.accept()[0]
    sock.sendall(b"hello")
    sock.recv(8)
    sock.sendall(b"answer")
"""


@pytest.mark.full
@pytest.mark.usefixtures("_possible")
def test_what_is_said_in_a_cut_of_five_seconds_arrives():
    """The first keepalive probe is lost in it, and the kernel sends the words again later and later."""
    with Namespaces(2, rate="") as hosts:
        listening = subprocess.Popen(hosts.command(2, [sys.executable, "-c", _ANSWER]))
        command = hosts.command(1, [sys.executable, "-c", _SAY, hosts.address(2)])
        with subprocess.Popen(command, env={**os.environ, "PYTHONPATH": str(ROOT)}, stdout=subprocess.PIPE) as saying:
            assert saying.stdout is not None
            assert saying.stdout.readline() == b"hello\n"
            time.sleep(4.5)  # before the probe, which comes after five seconds
            hosts.cut(2)
            begun_s = time.monotonic()
            assert saying.stdout.readline() == b"sent\n"
            time.sleep(max(begun_s + 5 - time.monotonic(), 0))  # the fault itself
            hosts.heal(2)
            assert saying.stdout.readline() == b"answer\n"
    listening.wait(10)


@pytest.mark.usefixtures("_possible")
def test_a_driver_that_lasts_too_long_is_ended():
    cluster = Cluster(1, rate="")
    with cluster.hosts as hosts:
        begun_s = time.monotonic()
        with pytest.raises(HostsError, match="stopped"):
            cluster.driver(["tail", "-f", "/dev/null"], timeout_s=0.5)
        while "tail -f" in hosts.run(1, ["ps", "-eo", "args="]):
            assert time.monotonic() - begun_s < 30, "it is still there"


_MAKE = """
import sys
from tests.hosts.namespaces import Namespaces
with Namespaces(2, rate="") as hosts:
    print(*hosts._inits, flush=True)
    sys.stdin.read()
"""


@pytest.mark.usefixtures("_possible")
def test_nothing_is_left_when_the_process_that_made_hosts_is_killed():
    maker = subprocess.Popen(
        [sys.executable, "-c", _MAKE], cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert maker.stdout is not None
    inits = [int(one) for one in maker.stdout.readline().split()]
    assert len(inits) == 3
    maker.send_signal(signal.SIGKILL)
    maker.communicate()
    until_s = time.monotonic() + 30
    while any(Path(f"/proc/{one}/ns/net").exists() for one in inits):
        assert time.monotonic() < until_s, "a host is still there"
