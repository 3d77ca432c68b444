"""One word for one thing: no class has the name of another, and no value a name that says nothing."""

from __future__ import annotations

import ast
from collections import defaultdict

from tests.support.sources import trees

VAGUE = frozenset({"anew", "apart", "asked", "came", "found", "kept", "known", "made", "one", "told"})


def named(node: ast.AST) -> str:
    """The name of a value, an argument or a function that a node makes; empty: it makes none."""
    if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
        return node.id
    if isinstance(node, ast.arg):
        return node.arg
    return node.name if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) else ""


def test_no_class_has_the_name_of_another() -> None:
    files = defaultdict[str, list[str]](list)
    for file, tree in trees().items():
        for node in ast.walk(tree):
            if isinstance(node, ast.ClassDef):
                files[node.name].append(file)
    assert {name: where for name, where in files.items() if len(where) > 1} == {}


def test_names_say_what_a_value_is() -> None:
    vague = []
    for file, tree in trees().items():
        fields = {
            id(node.target)
            for owner in ast.walk(tree)
            if isinstance(owner, ast.ClassDef)
            for node in owner.body
            if isinstance(node, ast.AnnAssign)
        }
        vague += [
            f"{file}:{node.lineno}: {named(node)}"  # type: ignore[attr-defined]
            for node in ast.walk(tree)
            if named(node).strip("_") in VAGUE and id(node) not in fields
        ]
    assert vague == []
