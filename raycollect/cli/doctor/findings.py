"""Rows of the table, and what probes look at."""

from __future__ import annotations

import json
import os
import resource
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import Future
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import raycollect
from raycollect.core import threads
from raycollect.errors.text import shown

OK, WARNING, MISSING = "ok", "warning", "missing"

# How long a child process has for its answer: to import torch on a busy machine takes several seconds.
CHILD_TIMEOUT_S = 60.0
CHILDREN = 4  # how many of them run at a time


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """One row."""

    check: str = ""  # what was looked at; empty: what its probe is called
    state: str  # "ok"; "warning": it works, but worse than it could; or "missing"
    found: str
    cure: str = ""  # empty where there is nothing to do
    required: bool = False  # whether nothing works without it
    section: str = ""  # its heading


class ChildError(Exception):
    """A child process ended before it answered."""


def run_child(code: str, timeout_s: float) -> dict[str, Any]:
    """Runs code in a fresh interpreter of this environment; its last line of output is JSON. Raises ChildError."""
    try:
        done = subprocess.run(
            [sys.executable, "-c", code],
            env=_with_this_package(os.environ),
            capture_output=True,
            text=True,
            errors="replace",
            timeout=timeout_s,
            stdin=subprocess.DEVNULL,
            check=False,
        )
    except subprocess.TimeoutExpired as exc:
        raise ChildError(f"no answer after {timeout_s:g} s") from exc
    except OSError as exc:
        raise ChildError(f"no process could be started: {exc}") from exc
    if done.returncode < 0:
        raise ChildError(f"its process was ended by {_signal_name(-done.returncode)}")
    if done.returncode:
        raise ChildError(_last_line(done.stderr) or f"its process ended with {done.returncode}")
    try:
        answer = json.loads(_last_line(done.stdout))
    except (ValueError, RecursionError) as exc:
        raise ChildError(f"it said {shown(_last_line(done.stdout))}") from exc
    if not isinstance(answer, dict):
        raise ChildError(f"it said {shown(answer)}")
    return answer


def _with_this_package(environ: Mapping[str, str]) -> dict[str, str]:
    # The child imports the very same raycollect, also where it runs from its sources.
    folder = Path(raycollect.__file__).parents[1]
    if folder.name.endswith("-packages"):  # in front of the path it would hide modules of Python
        return dict(environ)
    return {**environ, "PYTHONPATH": os.pathsep.join(filter(None, (str(folder), environ.get("PYTHONPATH"))))}


@dataclass(frozen=True, kw_only=True)
class Machine:
    """The machine that probes look at; tests replace it. `limit` returns a soft limit, -1 for none."""

    root: Path = Path("/")
    environ: Mapping[str, str] = field(default_factory=lambda: dict(os.environ))
    run: Callable[[str, float], dict[str, Any]] = run_child
    is_there: Callable[[str], bool] = lambda name: find_spec(name) is not None
    limit: Callable[[int], int] = lambda which: resource.getrlimit(which)[0]

    _free: threading.Semaphore = field(default_factory=lambda: threading.Semaphore(CHILDREN), repr=False)
    _asking: threading.Lock = field(default_factory=threading.Lock, repr=False)
    _asked: dict[str, Future[dict[str, Any]]] = field(default_factory=dict, repr=False)

    def start(self, code: str, timeout_s: float = CHILD_TIMEOUT_S) -> Future[dict[str, Any]]:
        """Runs code in a child process, once for the same code."""
        with self._asking:
            if code not in self._asked:
                self._asked[code] = threads.apart(self._run, code, timeout_s)
            return self._asked[code]

    def _run(self, code: str, timeout_s: float) -> dict[str, Any]:
        with self._free:
            return self.run(code, timeout_s)

    def ask(self, code: str, timeout_s: float = CHILD_TIMEOUT_S) -> dict[str, Any]:
        """Runs code in a child process, and waits for its answer; raises ChildError."""
        return self.start(code, timeout_s).result()

    def read(self, path: str) -> str:
        """The text of a file under the root; empty where there is none."""
        try:
            return (self.root / path.lstrip("/")).read_text().strip()
        except OSError:
            return ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Probe:
    """A line of the table; `check` names it where its row does not."""

    section: str
    check: str
    look: Callable[[Machine], Finding | Iterable[Finding]]
    required: bool = False


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def _last_line(text: str) -> str:
    return text.strip().rpartition("\n")[2].strip()
