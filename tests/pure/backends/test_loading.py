"""Importing the libraries of backends, each in a process of its own."""

from __future__ import annotations

import subprocess
import sys
from importlib.util import find_spec

import pytest

from raycollect.backends.loading import XOSCAR_GLOO, load_library

if find_spec("xoscar") is None:  # importing it here would change how all tests pickle exceptions
    pytest.skip("xoscar is not installed", allow_module_level=True)

_LOAD = f"""
import pickle, sys, threading
from raycollect.backends.loading import load_library
found = set()
threads = [threading.Thread(target=lambda: found.add(load_library({XOSCAR_GLOO!r}))) for _ in range(4)]
for thread in threads:
    thread.start()
for thread in threads:
    thread.join()
(gloo,) = found
"""


def _run(code: str) -> str:
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def test_the_extension_of_xoscar_comes_without_the_package() -> None:
    """The package brings pandas along, and installs tblib, so that all pickled exceptions carry their tracebacks."""
    code = f"{_LOAD}print(sorted({{'xoscar', 'pandas', 'tblib'}} & set(sys.modules)), hasattr(gloo, 'rendezvous'))"
    assert _run(code) == "[] True"


def test_exceptions_are_pickled_as_before() -> None:
    raised = (
        "try:\n    1 / 0\nexcept ZeroDivisionError as exc:\n    print(pickle.loads(pickle.dumps(exc)).__traceback__)"
    )
    assert _run(f"{_LOAD}{raised}") == "None"


@pytest.mark.parametrize("first", ["ours", "theirs"])
def test_who_imports_xoscar_gets_the_same_module(first: str) -> None:
    theirs = "import xoscar.collective; from xoscar.collective import xoscar_pygloo\n"
    code = [_LOAD, theirs] if first == "ours" else [theirs, _LOAD]
    assert _run(f"{''.join(code)}print(gloo is xoscar_pygloo, xoscar.collective.common.xp is gloo)") == "True True"


@pytest.mark.parametrize("found", ["xoscar_pygloo", "xoscar.collective.xoscar_pygloo"])
def test_the_module_is_imported_by_its_full_name_as_ever(found: str) -> None:
    """With its packages, of which it is an attribute."""
    theirs = f"import {XOSCAR_GLOO}{f' as {found}' if '.' not in found else ''}\n"
    assert _run(f"{_LOAD}{theirs}print({found} is gloo)") == "True"


def test_other_libraries_are_imported_as_ever() -> None:
    assert load_library("xml.dom") is sys.modules["xml.dom"]
    with pytest.raises(ImportError, match="no_such_library"):
        load_library("no_such_library.part")
