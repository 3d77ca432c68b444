"""Drivers that run on a host of a cluster of three; tests start them by name.

Each is a function of the two workers per host; what it prints is in the message of a test that fails.
"""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Sequence

import ray

import raycollect as col
from tests.hosts import faults, values, versions

PROGRAMS = {**values.PROGRAMS, **versions.PROGRAMS, **faults.PROGRAMS}


def main(names: Sequence[str]) -> None:
    """Runs programs one after the other, on the same workers."""
    ray.init(log_to_driver=False, logging_level="warning")
    workers = [values.on(host) for host in (1, 2, 3) for _ in range(values.PER_HOST)]
    for name in names:
        began_s = time.monotonic()
        PROGRAMS[name](workers)
        with contextlib.suppress(col.errors.UnknownGroupError):
            col.destroy_collective_group()
        print(f"{name}: done in {time.monotonic() - began_s:.1f} s", flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
