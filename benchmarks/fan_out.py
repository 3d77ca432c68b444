"""What the messages of a plan with 1,024 participants cost the controller, sent directly and by the tree.

Simulated: no Ray, no participants. A second process reads what comes over authenticated loopback connections. It
answers with one `Done` per connection. Only the controller is timed, as the relays would be on other machines.

    python -m benchmarks.fan_out
"""

from __future__ import annotations

import os
import resource
import selectors
import socket
import statistics
import time
from typing import NamedTuple

from benchmarks.fan_out_shape import CONTROLLER, PLACE_NBYTES, build
from raycollect.channel.messages import Done, Order
from raycollect.channel.protocol import Connection
from raycollect.core.model import GroupSpec, OpKind, ReduceOp, task_key
from raycollect.planner import STAGING_NBYTES, Membership, Request, Ticket, Topology, encode_order, encode_program, plan

WORLD = 1024
PER_HOST = 16
ROUNDS = 30
ORDER_NBYTES = 180  # about what one participant's part of a message takes


class Figures(NamedTuple):
    """One round: wall clock and processor time of the controller, in ms."""

    send_ms: float
    send_cpu_ms: float
    all_ms: float
    all_cpu_ms: float


def connected(count: int) -> tuple[list[tuple[socket.socket, Connection]], list[tuple[socket.socket, Connection]]]:
    """Opens connections over loopback; returns both ends of all."""
    ours, theirs = [], []
    with socket.create_server(("127.0.0.1", 0), backlog=count) as server:
        for _ in range(count):
            near = socket.create_connection(server.getsockname())
            far, _ = server.accept()
            for one in (near, far):
                one.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            secret = os.urandom(32)
            client = Connection("client", secret, nonce=os.urandom(16))
            listener = Connection("server", secret, nonce=os.urandom(16))
            client.start()
            (proof,) = client.receive(listener.start())
            confirmation, _ = listener.receive(proof.data)  # type: ignore[union-attr]
            client.receive(confirmation.data)  # type: ignore[union-attr]
            ours.append((near, client))
            theirs.append((far, listener))
    return ours, theirs


def answer(ends: list[tuple[socket.socket, Connection]]) -> None:
    """The other process: reads orders and says `Done`, until the controller hangs up."""
    with selectors.DefaultSelector() as selector:
        for end in ends:
            selector.register(end[0], selectors.EVENT_READ, end)
        while True:
            for key, _ in selector.select():
                sock, connection = key.data
                data = sock.recv(1 << 18)
                if not data:
                    return
                for message in connection.receive(data):
                    if isinstance(message, Order):
                        ranks = list(range(len(message.payload) // ORDER_NBYTES))  # those below it
                        sock.sendall(connection.send(Done(seq=1, ranks=ranks, story=[])))


def controller_round(ends: list[tuple[socket.socket, Connection]], payloads: list[bytes]) -> Figures:
    """Sends each connection its message, and takes in the answers."""
    with selectors.DefaultSelector() as selector:
        for end in ends:
            selector.register(end[0], selectors.EVENT_READ, end)
        began_s, began_cpu_s = time.perf_counter(), time.process_time()
        for (sock, connection), payload in zip(ends, payloads, strict=True):
            sock.sendall(
                connection.send(Order(payload=payload, together=False, in_order=False, after=b"", rings=False))
            )
        sent_s, sent_cpu_s = time.perf_counter(), time.process_time()
        left = len(ends)
        while left:
            for key, _ in selector.select():
                sock, connection = key.data
                left -= len(connection.receive(sock.recv(1 << 18)))
        ended_s, ended_cpu_s = time.perf_counter(), time.process_time()
    return Figures(
        1e3 * (sent_s - began_s),
        1e3 * (sent_cpu_s - began_cpu_s),
        1e3 * (ended_s - began_s),
        1e3 * (ended_cpu_s - began_cpu_s),
    )


def payloads() -> tuple[list[bytes], list[bytes]]:
    """What the controller sends, directly and by the tree, for an allreduce over 64 hosts none of which is its own."""
    hosts = [at // PER_HOST for at in range(WORLD)]
    spec = GroupSpec(name="g", group_id="g", backend="tcp", world_size=WORLD, ops=("allreduce",))
    membership = Membership(spec=spec, participants=tuple(map(str, range(WORLD))), topology=Topology.of(hosts))
    operands = tuple((rank, task_key(rank.to_bytes(24), 1), None) for rank in range(WORLD))
    asked = Request(kind=OpKind.ALLREDUCE, group=spec, operands=operands, op=ReduceOp.SUM)
    planned = plan([asked], [membership], staging=STAGING_NBYTES)
    programs = [encode_program(planned.program(at)) for at in range(WORLD)]
    own = [encode_order(Ticket(1, 0), list(planned.sources(at)), b"") for at in range(WORLD)]  # type: ignore[arg-type]
    direct = [head + program for head, program in zip(own, programs, strict=True)]
    tree = build(hosts, -1)
    forwarded = []
    for at, parent in enumerate(tree.parents):
        if parent == CONTROLLER:
            inside = [one for one in range(WORLD) if one == at or at in tree.above(one)]
            distinct = dict.fromkeys(programs[one] for one in inside)
            forwarded.append(b"".join((*distinct, *(bytes(PLACE_NBYTES) + own[one] for one in inside))))
    assert sum(map(len, forwarded)) == tree.sent(programs, list(map(len, own)))[CONTROLLER].nbytes
    return direct, forwarded


def main() -> None:
    """Prints medians of both ways, which take turns."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    ways = dict(zip(("direct", "tree"), payloads(), strict=True))
    ours, theirs = connected(WORLD)
    child = os.fork()
    if not child:
        for sock, _ in ours:
            sock.close()
        answer(theirs)
        os._exit(0)
    for sock, _ in theirs:
        sock.close()
    found: dict[str, list[Figures]] = {way: [] for way in ways}
    for number in range(ROUNDS + 2):
        for way, messages in ways.items():
            figures = controller_round(ours[: len(messages)], messages)
            if number >= 2:  # the first fill caches
                found[way].append(figures)
    for sock, _ in ours:
        sock.close()
    os.waitpid(child, 0)
    for way, rounds in found.items():
        medians = ", ".join(
            f"{name} {statistics.median(column):.2f}"
            for name, column in zip(Figures._fields, zip(*rounds, strict=True), strict=True)
        )
        print(f"{way}: {len(ways[way])} messages, {sum(map(len, ways[way]))} bytes; {medians}")


if __name__ == "__main__":
    main()
