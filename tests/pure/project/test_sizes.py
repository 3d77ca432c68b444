"""Files and classes of the package stay short enough to be read at once."""

from __future__ import annotations

import ast
from pathlib import Path

import raycollect

MOST_LINES = 450
MOST_METHODS = 25


def test_files_and_classes_are_short() -> None:
    found = []
    for path in Path(raycollect.__file__).parent.rglob("*.py"):
        source = path.read_text()
        if (lines := len(source.splitlines())) > MOST_LINES:
            found.append(f"{path.name}: {lines} lines")
        for node in ast.walk(ast.parse(source)):
            if isinstance(node, ast.ClassDef):
                methods = sum(isinstance(one, ast.FunctionDef | ast.AsyncFunctionDef) for one in node.body)
                if methods > MOST_METHODS:
                    found.append(f"{path.name}: {node.name} has {methods} methods")
    assert not found
