"""What moving bytes costs on this system: the file that `raycollect bench --calibrate` writes, read for the planner.

::

    {"version": 1,
     "links": [{"place": "inside", "backend": "shm", "latency_s": 1.4e-05, "bandwidth": 5.1e9, "how": "measured: ..."}]}

The file is the one that `RAYCOLLECT_COSTS` names, else ``raycollect/costs.json`` under `XDG_CONFIG_HOME`, which is
``~/.config`` where it is not set. What it does not hold keeps its default.
"""

from __future__ import annotations

import json
import os
import warnings
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from raycollect.core import files
from raycollect.errors import InvalidArgumentError, Violation, refusal
from raycollect.planner.topology import BETWEEN, INSIDE, Link

ENVIRONMENT_VARIABLE = "RAYCOLLECT_COSTS"

FILE = "from the file"
"""`Link.source` of what the file of costs says."""

VERSION: Literal[1] = 1

MOST_NBYTES = 1 << 20
"""The longest file, in bytes."""

_MOST_TEXT = 1000  # characters of what is wrong with a file

Distance = Literal["inside", "between"]

PLACES: dict[Distance, tuple[str, ...]] = {"inside": ("shm", "tcp"), "between": ("tcp",)}
"""Whether two ranks are on one host or on two -> the backends whose link counts for it, best first."""

_DEFAULTS: dict[Distance, Link] = {"inside": INSIDE, "between": BETWEEN}


class Measured(msgspec.Struct, frozen=True, kw_only=True):
    """One link between ranks on one host or on two, over a backend; `how` says where its numbers are from."""

    place: Distance
    backend: str
    how: str = ""
    latency_s: Annotated[float, Meta(ge=0)]
    bandwidth: Annotated[float, Meta(gt=0)]

    @property
    def link(self) -> Link:
        """The link, for the planner."""
        return Link(latency_s=self.latency_s, bandwidth=self.bandwidth, source=FILE)


class _File(msgspec.Struct):
    version: Literal[1]
    links: list[Measured]


@dataclass(frozen=True, slots=True, kw_only=True)
class Costs:
    """What the planner reckons with: the link between ranks of one host, that between hosts, and all of the file."""

    inside: Link = INSIDE
    between: Link = BETWEEN
    measured: tuple[Measured, ...] = ()

    @classmethod
    def of(cls, measured: Iterable[Measured]) -> Costs:
        """Takes for each place the first of its backends that was measured, else the default."""
        links = tuple(measured)
        found = {(one.place, one.backend): one.link for one in links}
        chosen = {
            place: next((found[place, name] for name in names if (place, name) in found), _DEFAULTS[place])
            for place, names in PLACES.items()
        }
        return cls(inside=chosen["inside"], between=chosen["between"], measured=links)


def given(*, latency_s: float, bandwidth: float) -> Measured:
    """The link between hosts as a user knows it, in seconds and bytes per second."""
    how = "given by hand, not measured"
    return Measured(place="between", backend="tcp", latency_s=latency_s, bandwidth=bandwidth, how=how)


def table(measured: Iterable[Measured]) -> list[str]:
    """The measured links, and the defaults for the others, as the lines of a table."""
    rows = [(one.place, one.backend, one.link, one.how) for one in measured]
    there = {place for place, *_ in rows}
    rows += [(place, "", link, "the default") for place, link in _DEFAULTS.items() if place not in there]
    head = f"{'hosts':<8} {'over':<6} {'latency':>10} {'bandwidth':>12}  how"
    return [head] + [
        f"{place:<8} {backend:<6} {link.latency_s * 1e6:>7.1f} us {link.bandwidth / 1e9:>7.2f} GB/s  {how}"
        for place, backend, link, how in rows
    ]


def default_path(environ: Mapping[str, str] = os.environ) -> Path:
    """The file that `RAYCOLLECT_COSTS` names, else the one in the user's configuration."""
    named = environ.get(ENVIRONMENT_VARIABLE)
    if named:
        return Path(named)
    return Path(environ.get("XDG_CONFIG_HOME") or Path.home() / ".config") / "raycollect" / "costs.json"


def looked_up(environ: Mapping[str, str] = os.environ) -> tuple[Path, bool, bool]:
    """The file, whether `RAYCOLLECT_COSTS` names it, and whether it is to be read: a file that is named has to be."""
    path, is_named = default_path(environ), bool(environ.get(ENVIRONMENT_VARIABLE))
    return path, is_named, is_named or os.path.exists(path)  # noqa: PTH110 - `Path.exists` raises where it may not look


def current(environ: Mapping[str, str] = os.environ) -> Costs:
    """Reads the file; the defaults if there is none, or, with a warning, if that at the default place can't be used.

    Raises:
        InvalidArgumentError: The file that `RAYCOLLECT_COSTS` names can't be used.
    """
    path, is_named, is_there = looked_up(environ)
    if not is_there:
        return Costs()
    try:
        return read(path, source=ENVIRONMENT_VARIABLE if is_named else "the file of costs")
    except InvalidArgumentError as exc:
        if is_named:
            raise
        (violation,) = exc.violations
        warnings.warn(f"{violation.field} is {violation.found}: the defaults stand", RuntimeWarning, stacklevel=2)
        return Costs()


def read(path: str | os.PathLike[str], *, source: str = "the file of costs") -> Costs:
    """Reads a file of costs; `source` is what named it.

    Raises:
        InvalidArgumentError: It can't be read, or holds something else.
    """
    try:
        return Costs.of(msgspec.convert(files.read_json(path, MOST_NBYTES), _File).links)
    except OSError as exc:
        found = f"a file that can't be read ({exc.strerror})"
    except (ValueError, OverflowError) as exc:  # msgspec's are ValueErrors, too
        found = f"not a file of costs ({str(exc)[:_MOST_TEXT]})"
    violation = Violation(
        kind="argument",
        rank=-1,
        field=f"{source} {os.fspath(path)!r}",
        found=found,
        expected="what `raycollect bench --calibrate` writes",
    )
    raise refusal("costs", "", (violation,)) from None


def write(path: str | os.PathLike[str], measured: Iterable[Measured]) -> None:
    """Writes a file of costs whole or not at all, and makes its folder; OSError: it can't be written."""
    target = Path(path)
    target.parent.mkdir(parents=True, exist_ok=True)
    document = msgspec.to_builtins(_File(version=VERSION, links=list(measured)))
    files.write(target, f"{json.dumps(document, indent=2)}\n".encode())
