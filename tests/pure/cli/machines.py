"""Machines for the doctor to look at."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from raycollect.cli.doctor.findings import Machine


def machine_of(
    root: Path = Path("/nowhere"),
    environ: dict[str, str] | None = None,
    said: Any = None,
    there: bool = True,
    limit: int = -1,
) -> Machine:
    """Surroundings: children say `said`, or fail with it; packages are there or not; all limits are the same."""

    def run(code: str, timeout_s: float) -> dict[str, Any]:
        assert 0 < timeout_s <= 60
        compile(code, "<probe>", "exec")  # not ast.parse, which CPython 3.11 can't do in several threads
        if isinstance(said, Exception):
            raise said
        answer = said(code) if callable(said) else said
        return json.loads(json.dumps(answer))

    return Machine(root=root, environ=environ or {}, run=run, is_there=lambda name: there, limit=lambda which: limit)


def file_in(root: Path, path: str, text: str) -> None:
    target = root / path
    target.parent.mkdir(parents=True, exist_ok=True)
    target.write_text(text)
