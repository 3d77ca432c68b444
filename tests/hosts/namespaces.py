"""Hosts in network namespaces of one machine: own addresses, own links with a bandwidth, and cables that can be pulled.

Each host has its own network, mounts, host name, shared memory and process ids. A further namespace has the bridge that
joins them, so that no packet and no interface is outside. Whatever runs in a host ends with the host's first process,
and that one ends with the process that made the hosts, also by SIGKILL: the kernel then takes back networks, mounts and
memory. Needs root, `unshare`, `nsenter`, `setpriv` and `ip`, and `tc` for a bandwidth.
"""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from types import TracebackType

PREFIX = "10.77.0"
FOLDER = "/mnt"
"""A folder that every Linux has: in a host it is empty, and in memory."""

_TOOLS = ("unshare", "nsenter", "setpriv", "ip")
_BURST = "256k"  # above the largest segment of a virtual link
_QUEUE = "20ms"
_START_S = 20.0
_NOBODY = "02:00:00:00:00:fe"  # a hardware address that no interface has

# The first process of a host: it takes in what has lost its parent, as the first process of a machine does.
_HOST = """
mount --make-rprivate /
mount -t tmpfs tmpfs {folder}; mount -t tmpfs tmpfs /dev/shm; mkdir {folder}/tmp
hostname {name}; cat > {folder}/hosts; mount --bind {folder}/hosts /etc/hosts; ip link set lo up
touch {folder}/ready
while :; do sleep 3600 & wait $!; done
"""


class HostsError(Exception):
    """A command that makes or uses the hosts failed."""


@lru_cache(maxsize=1)
def objection() -> str:
    """Why there can be no hosts on this machine, or an empty string."""
    if os.geteuid() != 0:
        return "network namespaces need root"
    missing = [tool for tool in _TOOLS if shutil.which(tool) is None]
    if missing:
        return f"there is no {', '.join(missing)}"
    try:
        with Namespaces(2, rate="") as trial:
            trial.run(1, ["true"])
    except (HostsError, OSError) as exc:
        return f"this kernel makes no hosts: {exc}"
    return ""


@lru_cache(maxsize=1)
def shaping_objection() -> str:
    """Why links can have no bandwidth here, or an empty string."""
    if objection():
        return objection()
    try:
        with Namespaces(1, rate="1gbit"):
            return ""
    except HostsError as exc:
        return f"this kernel shapes no links: {exc}"


class Namespaces:
    """Hosts 1 to `count`, with addresses 10.77.0.1, ..., on one bridge; a context manager.

    `rate` is the bandwidth of each host's link in both directions, as `tc` writes it; empty: as fast as it goes.
    Entered in the main thread: with the thread that has entered it, the hosts end.
    """

    def __init__(self, count: int, *, rate: str = "1gbit") -> None:
        self.count = count
        self._rate = rate
        self._first: list[subprocess.Popen[bytes]] = []  # the switch, then the hosts
        self._inits: list[int] = []  # the first process in each, as seen from here

    @property
    def numbers(self) -> range:
        """The numbers of the hosts."""
        return range(1, self.count + 1)

    @staticmethod
    def address(host: int) -> str:
        """The address of a host."""
        return f"{PREFIX}.{host}"

    @staticmethod
    def name(host: int) -> str:
        """The name of a host."""
        return f"host{host}"

    def __enter__(self) -> Namespaces:  # noqa: PYI034 - `Self` is newer than Python 3.10
        try:
            self._start("switch", ["--net"])
            self._ip(0, "link", "add", "bridge", "type", "bridge")
            self._ip(0, "link", "set", "bridge", "up")
            for host in self.numbers:
                self._add(host)
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(self, kind: type[BaseException] | None, exc: BaseException | None, tb: TracebackType | None) -> None:
        self.close()

    def close(self) -> None:
        """Ends all that runs in the hosts, and the hosts."""
        for init in self._inits:
            _kill(init)
        for first in self._first:
            first.kill()
            first.wait()
        self._first, self._inits = [], []

    def command(self, host: int, arguments: Sequence[str]) -> list[str]:
        """The command line that runs a command on a host; what it runs there ends with it."""
        enter = ["nsenter", "--target", str(self._inits[host]), f"--wd={Path.cwd()}", "--net"]
        if host == 0:
            return [*enter, "--", *arguments]
        # Among the host's processes it is a child of `nsenter`.
        return [*enter, "--mount", "--uts", "--ipc", "--pid", "--", "setpriv", "--pdeathsig", "KILL", *arguments]

    def run(
        self, host: int, arguments: Sequence[str], *, env: Mapping[str, str] | None = None, timeout_s: float = 60.0
    ) -> str:
        """Runs a command on a host; returns what it printed. Raises HostsError if it fails or lasts longer."""
        try:
            done = subprocess.run(
                self.command(host, arguments),
                env=env,
                stdin=subprocess.DEVNULL,
                capture_output=True,
                text=True,
                check=False,
                timeout=timeout_s,
            )
        except subprocess.TimeoutExpired as exc:
            raise HostsError(f"{' '.join(arguments)} on host {host} has not ended after {timeout_s:g} s") from exc
        if done.returncode:
            raise HostsError(f"{' '.join(arguments)} on host {host}: {done.returncode}\n{done.stdout}{done.stderr}")
        return done.stdout

    def counters(self) -> list[tuple[int, int]]:
        """For each host, the bytes that its link has (sent, received); what stays inside a host does not count."""
        return [_counters(self._inits[host]) for host in self.numbers]

    def shape(self, host: int, rate: str) -> None:
        """Gives the link of a host a bandwidth in both directions, as `tc` writes it."""
        for place, device in ((0, f"port{host}"), (host, "eth0")):
            shape = ["root", "tbf", "rate", rate, "burst", _BURST, "latency", _QUEUE]
            self.run(place, ["tc", "qdisc", "replace", "dev", device, *shape])

    def cut(self, host: int) -> None:
        """Pulls the cable of a host."""
        self._ip(0, "link", "set", f"port{host}", "down")

    def heal(self, host: int) -> None:
        """Plugs it in again."""
        self._ip(0, "link", "set", f"port{host}", "up")

    def lose(self, sender: int, receiver: int) -> None:
        """From now on nothing that one host sends arrives at another; what comes back does."""
        self._ip(
            sender, "neigh", "replace", self.address(receiver), "lladdr", _NOBODY, "dev", "eth0", "nud", "permanent"
        )

    def find(self, sender: int, receiver: int) -> None:
        """Ends `lose`."""
        self._ip(sender, "neigh", "del", self.address(receiver), "dev", "eth0")

    def cut_link(self, one: int, other: int) -> None:
        """Two hosts don't reach each other any more; all others reach both."""
        self.lose(one, other)
        self.lose(other, one)

    def heal_link(self, one: int, other: int) -> None:
        """Ends `cut_link`."""
        self.find(one, other)
        self.find(other, one)

    def heal_all(self) -> None:
        """Ends all of these faults."""
        for host in self.numbers:
            self.heal(host)
            self._ip(host, "neigh", "flush", "dev", "eth0", "nud", "permanent")

    def processes(self, host: int, name: str) -> list[int]:
        """The ids, on that host, of the processes of a name."""
        try:
            return [int(one) for one in self.run(host, ["pgrep", "-x", name]).split()]
        except HostsError:
            return []

    def signal(self, host: int, name: str, number: int = signal.SIGKILL) -> int:
        """Sends a signal to the processes of a name on a host; returns to how many."""
        found = self.processes(host, name)
        if found:
            self.run(host, ["kill", f"-{int(number)}", *map(str, found)])
        return len(found)

    def _add(self, host: int) -> None:
        known = [f"{self.address(one)} {self.name(one)}" for one in self.numbers]
        script = _HOST.format(folder=FOLDER, name=self.name(host))
        kinds = ["--net", "--mount", "--uts", "--ipc", "--pid", "--fork", "--kill-child=SIGKILL", "--mount-proc"]
        self._start(script, kinds, "\n".join(["127.0.0.1 localhost", *known, ""]))
        port, init = f"port{host}", str(self._inits[host])
        self._ip(0, "link", "add", port, "type", "veth", "peer", "name", "eth0", "netns", init)
        self._ip(0, "link", "set", port, "master", "bridge", "up")
        self._ip(host, "addr", "add", f"{self.address(host)}/24", "dev", "eth0")
        self._ip(host, "link", "set", "eth0", "up")
        if self._rate:
            self.shape(host, self._rate)

    def _start(self, script: str, kinds: Sequence[str], given: str = "") -> None:
        is_switch = "--fork" not in kinds
        command = ["sleep", "infinity"] if is_switch else ["bash", "-c", script]
        with tempfile.TemporaryFile() as told, tempfile.TemporaryFile() as stdin:
            stdin.write(given.encode())
            stdin.seek(0)
            # With the thread that starts it, it ends.
            first = subprocess.Popen(
                ["setpriv", "--pdeathsig", "KILL", "unshare", *kinds, *command],
                stdin=stdin,
                stdout=told,
                stderr=told,
                start_new_session=True,
            )
            self._first.append(first)
            until_s = time.monotonic() + _START_S
            while time.monotonic() < until_s and first.poll() is None:
                init = _inside(first.pid) if is_switch else _child(first.pid)
                if init and (is_switch or Path(f"/proc/{init}/root{FOLDER}/ready").exists()):
                    self._inits.append(init)
                    return
                time.sleep(0.01)
            told.seek(0)
            raise HostsError(f"a namespace did not start: {told.read().decode(errors='replace').strip()}")

    def _ip(self, host: int, *arguments: str) -> None:
        self.run(host, ["ip", *arguments])


def _kill(process: int) -> None:
    try:
        os.kill(process, signal.SIGKILL)
    except ProcessLookupError:
        pass


def _inside(process: int) -> int:
    """The process itself, once it is in a network of its own; else 0."""
    try:
        own = Path(f"/proc/{process}/ns/net").readlink() != Path("/proc/self/ns/net").readlink()
        return process if own and Path(f"/proc/{process}/comm").read_text().strip() == "sleep" else 0
    except OSError:
        return 0


def _child(process: int) -> int:
    """The child of a process; 0: it has none yet."""
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = path.read_text().rpartition(")")[2].split()
        except OSError:
            continue
        if int(fields[1]) == process:
            return int(path.parent.name)
    return 0


def _counters(process: int) -> tuple[int, int]:
    for line in Path(f"/proc/{process}/net/dev").read_text().splitlines():
        if line.strip().startswith("eth0:"):
            found = re.findall(r"\d+", line.partition(":")[2])
            return int(found[8]), int(found[0])
    raise HostsError("a host has no link")
