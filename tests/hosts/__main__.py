"""The command line: a Ray cluster on hosts of its own, for as long as a command runs on the first one."""

from __future__ import annotations

import argparse
import subprocess
import sys
from collections.abc import Sequence

from tests.hosts.cluster import PORT, Cluster
from tests.hosts.namespaces import objection, shaping_objection


def main(arguments: Sequence[str] | None = None) -> int:
    """Starts a Ray node on each of several hosts in network namespaces, and runs a command on host 1.

    Host n has the address 10.77.0.n and the Ray resource host<n>. When the command has ended, the bytes of each link
    are shown and everything is gone.
    """
    parser = argparse.ArgumentParser(prog="python -m tests.hosts", description=main.__doc__)
    parser.add_argument("--hosts", type=int, default=3, help="how many hosts (default: 3)")
    parser.add_argument(
        "--rate", default="1gbit", help="the bandwidth of each link, for tc; '' for none (default: 1gbit)"
    )
    parser.add_argument("command", nargs=argparse.REMAINDER, help="what to run on host 1 (default: a shell)")
    options = parser.parse_args(arguments)
    reason = shaping_objection() if options.rate else objection()
    if reason:
        print(reason, file=sys.stderr)
        return 2
    command = [one for one in options.command if one != "--"] or ["bash"]
    with Cluster(options.hosts, rate=options.rate) as cluster:
        hosts = cluster.hosts
        env = {**cluster.environment(), "RAY_ADDRESS": f"{hosts.address(1)}:{PORT}"}
        before = hosts.counters()
        code = subprocess.run(hosts.command(1, command), env=env, check=False).returncode
        for host, (old, new) in zip(hosts.numbers, zip(before, hosts.counters(), strict=True), strict=True):
            print(f"{hosts.name(host)}: sent {new[0] - old[0]:,} bytes, received {new[1] - old[1]:,}", file=sys.stderr)
    return code


if __name__ == "__main__":
    sys.exit(main())
