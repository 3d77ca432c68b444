"""ARCHITECTURE.md names functions that exist."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import raycollect

PACKAGE = Path(raycollect.__file__).parent
ROW = re.compile(r"^\| `([\w/]+\.py)` \| `([\w.]+)` \|", re.MULTILINE)


def functions(path: Path) -> set[str]:
    """The functions and methods of a file: ``"name"``, ``"Class.name"``."""
    found = set[str]()
    for node in ast.parse(path.read_text()).body:
        if isinstance(node, ast.FunctionDef):
            found.add(node.name)
        elif isinstance(node, ast.ClassDef):
            found.update(f"{node.name}.{one.name}" for one in node.body if isinstance(one, ast.FunctionDef))
    return found


def test_a_call_passes_functions_that_exist() -> None:
    rows = ROW.findall((PACKAGE.parent / "ARCHITECTURE.md").read_text())
    assert len(rows) == 10
    assert [f"{file} {name}" for file, name in rows if name not in functions(PACKAGE / file)] == []
