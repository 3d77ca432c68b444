"""A real Ray cluster on hosts of `namespaces`, and drivers that run there and may ask for faults.

A driver asks by `outside(...)`: a line on its output that begins with `ASK` names a method of `Cluster` that `ASKED`
lists; the answer comes on its input, as JSON. So one driver plays a whole scenario: it cuts a cable between two calls.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import TracebackType
from typing import Any

from tests.hosts.namespaces import FOLDER, HostsError, Namespaces

ROOT = Path(__file__).parents[2]
PORT = 6379
ASK = "\x01ask "

ASKED = ("counters", "cut", "heal", "lose", "find", "cut_link", "heal_link", "signal", "start_node", "shape")
"""What a driver may ask for."""

_START_S = 120.0


class Cluster:
    """Hosts with a Ray node each, the head on host 1; a context manager. Host n offers the resource ``host<n>``."""

    def __init__(self, count: int = 3, *, rate: str = "1gbit", store_nbytes: int = 400 << 20) -> None:
        self.hosts = Namespaces(count, rate=rate)
        self._store_nbytes = store_nbytes

    def __enter__(self) -> Cluster:  # noqa: PYI034 - `Self` is newer than Python 3.10
        self.hosts.__enter__()
        try:
            self.start_node(1)
            with ThreadPoolExecutor() as pool:
                list(pool.map(self.start_node, self.hosts.numbers[1:]))
        except BaseException:
            self.hosts.close()
            raise
        return self

    def __exit__(self, kind: type[BaseException] | None, exc: BaseException | None, tb: TracebackType | None) -> None:
        self.hosts.close()

    def start_node(self, host: int) -> None:
        """Starts the Ray node of a host."""
        role = [f"--address={self.hosts.address(1)}:{PORT}"]
        if host == 1:
            role = ["--head", f"--port={PORT}", "--include-dashboard=false", "--disable-usage-stats"]
        arguments = [
            *(sys.executable, "-m", "ray.scripts.scripts", "start", *role),
            f"--node-ip-address={self.hosts.address(host)}",
            "--num-cpus=1",
            f"--resources={json.dumps({self.hosts.name(host): 100})}",
            f"--object-store-memory={self._store_nbytes}",
        ]
        self.hosts.run(host, arguments, env=self.environment(), timeout_s=_START_S)

    def environment(self) -> dict[str, str]:
        """The environment of what runs on a host."""
        plain = {name: value for name, value in os.environ.items() if not name.startswith(("RAY_", "RAYCOLLECT_"))}
        return {
            **plain,
            "PYTHONPATH": str(ROOT),
            "RAY_AUTH_MODE": "disabled",
            "RAY_USAGE_STATS_ENABLED": "0",
            "RAY_TMPDIR": FOLDER,
            # Ray takes a node for dead after some 64 s; cuts of a minute are to end safely before.
            "RAY_health_check_failure_threshold": "10",
            "TMPDIR": f"{FOLDER}/tmp",
            "XDG_CONFIG_HOME": f"{FOLDER}/tmp",
        }

    def driver(
        self, arguments: Sequence[str], *, env: Mapping[str, str] | None = None, host: int = 1, timeout_s: float = 300.0
    ) -> str:
        """Runs a driver on a host and does what it asks for; returns what else it printed.

        Raises:
            HostsError: It failed, or has not ended in time; the message has what it printed.
        """
        address = f"{self.hosts.address(1)}:{PORT}"
        told: list[str] = []
        process = subprocess.Popen(
            self.hosts.command(host, arguments),
            cwd=ROOT,
            env={**self.environment(), "RAY_ADDRESS": address, "PYTHONUNBUFFERED": "1", **(env or {})},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        limit = threading.Timer(timeout_s, process.kill)
        limit.start()
        began_s = time.monotonic()
        try:
            assert process.stdout is not None
            assert process.stdin is not None
            for line in process.stdout:
                if line.startswith(ASK):
                    process.stdin.write(self._answer(line[len(ASK) :]) + "\n")
                    process.stdin.flush()
                else:
                    told.append(line)
            code = process.wait()
        finally:
            limit.cancel()
            process.kill()
            process.communicate()
        printed = "".join(told)
        if code:
            lasted = f"after {time.monotonic() - began_s:.0f} s" + (" (stopped)" if code == -9 else "")
            raise HostsError(f"{' '.join(arguments)}: {code} {lasted}\n{printed}")
        return printed

    def _answer(self, asked: str) -> str:
        name, *arguments = json.loads(asked)
        if name not in ASKED:
            raise HostsError(f"a driver asks for {name}")
        owner = self if name == "start_node" else self.hosts
        return json.dumps(getattr(owner, name)(*arguments))


def outside(name: str, *arguments: Any) -> Any:
    """For a driver on a host: calls a method of the cluster that `ASKED` lists."""
    sys.stdout.write(ASK + json.dumps([name, *arguments]) + "\n")
    sys.stdout.flush()
    return json.loads(sys.stdin.readline())
