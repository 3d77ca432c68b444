"""Rules for the tests themselves: what they import of each other, and what they patch of the package."""

from __future__ import annotations

import ast
import re
from collections import Counter
from collections.abc import Iterator
from functools import cache
from pathlib import Path

TESTS = Path(__file__).parents[2]

IMPORT, PATCH = (
    re.compile(r"import test_|\.test_\w+ import|tests\S*\.test_"),
    re.compile(r"\.(?:set|del)attr\(|setitem\(|patch"),
)

IMPORTED = frozenset({"tests.pure.planner.test_render"})
"""Test modules that others import from: this may only shrink."""

MOST_PATCHES = {
    "": 1,
    "faults": 1,
    "pure/backends": 54,
    "pure/captured": 2,
    "pure/channel": 11,
    "pure/core": 14,
    "pure/driver": 10,
    "pure/engine": 10,
    "pure/group": 15,
    "pure/member": 7,
    "pure/observe": 1,
    "pure/planner": 3,
    "pure/pos": 8,
    "pure/ray_bridge": 5,
    "pure/weights": 12,
    "ray": 10,
}
"""Folder -> how many patches of the package's own names its tests have: this may only shrink."""


@cache
def files() -> tuple[tuple[str, str], ...]:
    """Each file of the tests, by its path, and its text."""
    return tuple((path.relative_to(TESTS).as_posix(), path.read_text()) for path in sorted(TESTS.rglob("*.py")))


def imported_tests(text: str) -> Iterator[str]:
    """The test modules that a module imports from."""
    if not IMPORT.search(text):
        return
    for node in ast.walk(ast.parse(text)):
        names = []
        if isinstance(node, ast.Import):
            names = [one.name for one in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module is not None and node.level == 0:
            names = [node.module, *(f"{node.module}.{one.name}" for one in node.names)]
        for name in names:
            if name.startswith("tests.") and name.rpartition(".")[2].startswith("test_"):
                yield name


def patches(text: str) -> int:
    """How many names of the package a module patches."""
    if not PATCH.search(text):
        return 0
    tree = ast.parse(text)
    ours = {
        (one.asname or one.name).split(".")[0]
        for node in ast.walk(tree)
        if isinstance(node, (ast.Import, ast.ImportFrom))
        for one in node.names
        if (getattr(node, "module", None) or one.name).split(".")[0] == "raycollect"
    }
    return sum(
        _is_ours(node.args[0], ours)
        for node in ast.walk(tree)
        if isinstance(node, ast.Call)
        and isinstance(node.func, ast.Attribute)
        and node.func.attr in ("setattr", "setitem", "delattr", "patch", "object")
        and node.args
    )


def _is_ours(target: ast.expr, ours: set[str]) -> bool:
    if isinstance(target, ast.Constant):
        return str(target.value).startswith("raycollect.")
    while isinstance(target, ast.Attribute):
        target = target.value
    return isinstance(target, ast.Name) and target.id in ours


def test_no_test_imports_another() -> None:
    found = {name for _, text in files() for name in imported_tests(text)}
    assert found <= IMPORTED, "move what they share to a module without tests"


def test_the_contract_knows_public_names_alone() -> None:
    for path, text in files():
        if path.startswith("contract/"):
            assert set(re.findall(r"(?:from|import) (raycollect[.\w]*)", text)) <= {"raycollect", "raycollect.torch"}
            assert patches(text) == 0, path


def test_no_more_names_of_the_package_are_patched() -> None:
    """Give an argument instead, as `clock`, `sleep` or `faults`."""
    found = Counter[str]()
    for path, text in files():
        found[path.rpartition("/")[0]] += patches(text)
    assert {folder: count for folder, count in found.items() if count > MOST_PATCHES.get(folder, 0)} == {}
