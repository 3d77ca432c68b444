"""The suites, by name, in the order in which they are measured: those that need no Ray come first."""

from __future__ import annotations

SUITES = {
    name: f"benchmarks.suites.{name}"
    for name in (
        "kernel",
        "ddp",
        "plan",
        "driver",
        "iteration",
        "captured",
        "cold",
        "timeline",
        "training",
        "batch",
        "reshard",
        "weights",
        "streams",
        "p2p",
        "members",
        "scale",
        "memory",
        "hosts",
    )
}
"""Name -> module."""
