"""The option that lets the fault matrix measure itself."""

from __future__ import annotations

import pytest


def pytest_addoption(parser: pytest.Parser) -> None:
    """Adds ``--reliability=N``."""
    text = "run each case of the fault matrix N times, and write how long it took into tests/faults/results.md"
    parser.addoption("--reliability", type=int, default=0, metavar="N", help=text)
