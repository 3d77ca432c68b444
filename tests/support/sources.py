"""The sources of the package, for tests that read them."""

from __future__ import annotations

import ast
from pathlib import Path

import raycollect

PACKAGE = Path(raycollect.__file__).parent


def trees(folder: Path = PACKAGE) -> dict[str, ast.Module]:
    """The files of a folder of the package, by their paths in the package."""
    paths = sorted(folder.rglob("*.py"))
    return {path.relative_to(PACKAGE).as_posix(): ast.parse(path.read_text()) for path in paths}
