"""The suites, by name, in the order in which they are measured: those that need no Ray come first."""

from __future__ import annotations

SUITES = {
    name: f"benchmarks.suites.{name}"
    for name in (
        "kernel",
        "ddp",
        "driver",
        "iteration",
        "captured",
        "cold",
        "timeline",
        "batch",
        "reshard",
        "weights",
        "streams",
        "p2p",
        "scale",
        "memory",
        "hosts",
    )
}
"""Name -> module."""
