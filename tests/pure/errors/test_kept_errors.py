"""Errors that somebody keeps: they hold no frame, and each raise is of a new one."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

import raycollect
from raycollect.errors import KernelError, copy_error, strip_traceback


def test_a_kept_error_has_no_frames_and_a_new_one_leaves_it_so():
    def fail():
        try:
            raise ZeroDivisionError
        except ZeroDivisionError as exc:
            raise KernelError(rank=1, detail="x") from exc

    try:
        fail()
    except KernelError as exc:
        error = strip_traceback(exc)
    cause = error.__cause__
    assert isinstance(cause, ZeroDivisionError)
    assert [failure.__traceback__ for failure in (error, cause)] == [None, None]
    with pytest.raises(KernelError) as raised:
        raise copy_error(error)
    assert raised.value is not error
    assert (raised.value.rank, raised.value.detail, raised.value.__cause__) == (1, "x", cause)
    assert error.__traceback__ is None


def test_the_exception_that_a_user_handles_keeps_its_frames():
    with pytest.raises(ZeroDivisionError) as raised:
        try:
            raise ZeroDivisionError
        except ZeroDivisionError:
            try:
                raise KernelError(detail="a call of the user's handler fails")
            except KernelError as exc:
                strip_traceback(exc)
            raise
    assert raised.value.__traceback__.tb_next is None


def _raised_in_place(function):
    """The `raise` statements of a function that raise an object which somebody has."""
    handled = {}  # a raise -> the name of the exception that is handled there
    for handler in ast.walk(function):
        if isinstance(handler, ast.ExceptHandler):
            handled |= {id(node): handler.name for node in ast.walk(handler) if isinstance(node, ast.Raise)}
    dropped = {
        name.id
        for node in ast.walk(function)
        if isinstance(node, ast.Try)
        for statement in node.finalbody
        if isinstance(statement, ast.Delete)
        for name in statement.targets
        if isinstance(name, ast.Name)
    }
    for node in ast.walk(function):
        if not isinstance(node, ast.Raise) or node.exc is None or isinstance(node.exc, ast.Call):
            continue
        name = node.exc.id if isinstance(node.exc, ast.Name) else ""
        if name.lstrip("_")[:1].isupper() or name in dropped or (name and name == handled.get(id(node))):
            continue
        yield ast.unparse(node)


def test_no_error_is_raised_that_somebody_keeps():
    """Its traceback would hold it, and all that its frames and their callers hold. Use `copy_error`."""
    raised = []
    for path in sorted(Path(raycollect.__file__).parent.rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
                raised += [f"{path.name}, {node.name}: {statement}" for statement in _raised_in_place(node)]
    assert "\n".join(raised) == ""
