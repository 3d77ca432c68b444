"""What the workloads share: they start Ray, and show what they have checked."""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Mapping
from typing import NoReturn

import ray


def start_ray() -> None:
    """Joins the cluster that RAY_ADDRESS names, or starts Ray on this machine; says which."""
    address = os.environ.get("RAY_ADDRESS", "local")
    print("starting Ray on this machine" if address == "local" else f"joining the Ray cluster at {address}", flush=True)
    ray.init(address, include_dashboard=False, log_to_driver=False, logging_level=logging.WARNING)


def finish(checks: Mapping[str, bool]) -> NoReturn:
    """Prints the checks, and exits with 1 if one does not hold."""
    for name, holds in checks.items():
        print(f"{'ok' if holds else 'NOT OK':>6}  {name}")
    sys.exit(0 if all(checks.values()) else 1)
