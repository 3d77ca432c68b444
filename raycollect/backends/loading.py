"""Imports the libraries of backends.

xoscar's fork of pygloo is one extension, which needs nothing else of xoscar. Importing the package takes 0.4 s, brings
pandas along, and makes all exceptions that the process pickles carry their tracebacks (it installs tblib), also those
of the user. So the extension is loaded alone, under its own name: whoever imports xoscar later gets the same module.
"""

from __future__ import annotations

import sys
import threading
from importlib import import_module
from importlib.machinery import ExtensionFileLoader, ModuleSpec, PathFinder
from importlib.util import find_spec, module_from_spec
from typing import Any

XOSCAR_GLOO = "xoscar.collective.xoscar_pygloo"
_ALONE = frozenset({XOSCAR_GLOO})
"""Extensions that are loaded without their packages."""

_loading = threading.Lock()
_loaded: dict[str, Any] = {}  # an extension is executed once in a process


def load_library(library: str) -> Any:
    """Imports a module of a library; raises ImportError, or OSError where a shared object under it is not there."""
    if library not in _ALONE:
        return import_module(library)
    with _loading:
        if library in _loaded:
            return _loaded[library]
        found = None if library.partition(".")[0] in sys.modules else _extension(library)
        if found is None or found.loader is None:
            return import_module(library)
        module = sys.modules[library] = module_from_spec(found)
        try:
            found.loader.exec_module(module)
        finally:
            del sys.modules[library]  # there an import of it would find it, and leave out its packages
        _loaded[library] = module
        return module


def _extension(library: str) -> ModuleSpec | None:
    """Finds an extension and imports none of its packages; None where it is none, or not found so."""
    top, *path = library.split(".")
    found, name = find_spec(top), top
    for part in path:
        if found is None or found.submodule_search_locations is None:
            return None
        name = f"{name}.{part}"
        found = PathFinder.find_spec(name, found.submodule_search_locations)
    return found if found is not None and isinstance(found.loader, ExtensionFileLoader) else None
