"""Which of the conformance suite's tests are more of the same."""

from __future__ import annotations

import pytest

LIBRARIES = ("gloo", "torch:gloo")
"""The backends that fold and copy in a library, in processes: slow here, and the same for any number of ranks."""


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if item.path.name == "test_conformance.py" and isinstance(item, pytest.Function):
            chosen = item.callspec.params if hasattr(item, "callspec") else {}
            if chosen.get("team_of") in LIBRARIES and chosen.get("world", 3) != 3:
                item.add_marker(pytest.mark.full)
