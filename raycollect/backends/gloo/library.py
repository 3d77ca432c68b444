"""Loads the library of backend `gloo`: pygloo or, if that is not installed, the fork that xoscar ships.

Importing this module imports the library, as `gloo`. xoscar's fork is one extension, which is loaded without its
package: importing the package takes 0.4 s, imports pandas, and makes all exceptions that the process pickles carry
their tracebacks. A later import of xoscar finds the same extension.
"""

from __future__ import annotations

from importlib.machinery import PathFinder
from importlib.util import find_spec, module_from_spec
from typing import Any

_FORK = "xoscar.collective.xoscar_pygloo"


def _load() -> Any:
    try:
        import pygloo
    except (ImportError, OSError) as exc:  # OSError: a shared object under it is missing
        package = find_spec("xoscar")
        folders = package.submodule_search_locations or () if package else ()
        spec = PathFinder.find_spec(_FORK, [f"{folder}/collective" for folder in folders])
        if spec is None or spec.loader is None:
            raise ImportError(f"pygloo: {exc}; {_FORK}: not installed") from exc
        fork = module_from_spec(spec)
        spec.loader.exec_module(fork)
        return fork
    return pygloo


gloo: Any = _load()
