"""The cost of moving bytes on this system: the file that `raycollect bench --calibrate` writes, read for the planner.

::

    {"version": 1,
     "links": [{"place": "inside", "backend": "shm", "latency_s": 1.4e-05, "bandwidth": 5.1e9, "how": "measured: ..."}]}

The file is that of `RAYCOLLECT_COSTS`, else ``raycollect/costs.json`` under `XDG_CONFIG_HOME`, by default
``~/.config``. Links that the file lacks have default costs.
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
"""`Link.source` of links from the file."""

VERSION: Literal[1] = 1

MOST_NBYTES = 1 << 20
"""The longest file, in bytes."""

_MOST_TEXT = 1000  # characters of an error in a file

Distance = Literal["inside", "between"]

PLACES: dict[Distance, tuple[str, ...]] = {"inside": ("shm", "tcp"), "between": ("tcp",)}
"""Whether two ranks are on one host or on two -> the backends whose measurement counts, best first."""

_DEFAULTS: dict[Distance, Link] = {"inside": INSIDE, "between": BETWEEN}


class MeasuredLink(msgspec.Struct, frozen=True, kw_only=True):
    """One link between ranks on one host or on two, over a backend; `how` is the origin of its numbers."""

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
    links: list[MeasuredLink]


@dataclass(frozen=True, slots=True, kw_only=True)
class Costs:
    """The planner's costs: of links inside a host and between hosts, and all links of the file."""

    inside: Link = INSIDE
    between: Link = BETWEEN
    measured: tuple[MeasuredLink, ...] = ()

    @classmethod
    def of(cls, measured: Iterable[MeasuredLink]) -> Costs:
        """Takes for each place the first of its backends that was measured, or the default."""
        links = tuple(measured)
        by_backend = {(link.place, link.backend): link.link for link in links}
        chosen = {
            place: next((by_backend[place, name] for name in names if (place, name) in by_backend), _DEFAULTS[place])
            for place, names in PLACES.items()
        }
        return cls(inside=chosen["inside"], between=chosen["between"], measured=links)


def given(*, latency_s: float, bandwidth: float) -> MeasuredLink:
    """A link between hosts with a user's numbers, in seconds and bytes per second."""
    how = "given by hand, not measured"
    return MeasuredLink(place="between", backend="tcp", latency_s=latency_s, bandwidth=bandwidth, how=how)


def table(measured: Iterable[MeasuredLink]) -> list[str]:
    """The measured links, and the defaults of the others, as the lines of a table."""
    rows = [(link.place, link.backend, link.link, link.how) for link in measured]
    there = {place for place, *_ in rows}
    rows += [(place, "", link, "the default") for place, link in _DEFAULTS.items() if place not in there]
    head = f"{'hosts':<8} {'over':<6} {'latency':>10} {'bandwidth':>12}  how"
    return [head] + [
        f"{place:<8} {backend:<6} {link.latency_s * 1e6:>7.1f} us {link.bandwidth / 1e9:>7.2f} GB/s  {how}"
        for place, backend, link, how in rows
    ]


def default_path(environ: Mapping[str, str] = os.environ) -> Path:
    """The file that `RAYCOLLECT_COSTS` names, or the file in the user's configuration."""
    named = environ.get(ENVIRONMENT_VARIABLE)
    if named:
        return Path(named)
    return Path(environ.get("XDG_CONFIG_HOME") or Path.home() / ".config") / "raycollect" / "costs.json"


def looked_up(environ: Mapping[str, str] = os.environ) -> tuple[Path, bool, bool]:
    """Returns the file, whether `RAYCOLLECT_COSTS` names it, and whether to read it: a named file must exist."""
    path, is_named = default_path(environ), bool(environ.get(ENVIRONMENT_VARIABLE))
    return path, is_named, is_named or os.path.exists(path)  # noqa: PTH110 - `Path.exists` raises without permission


def current(environ: Mapping[str, str] = os.environ) -> Costs:
    """Reads the file. Returns the defaults if it does not exist, or, with a warning, if the default file can't be used.

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
        warnings.warn(f"{violation.field} is {violation.found}: the defaults are used", RuntimeWarning, stacklevel=2)
        return Costs()


def read(path: str | os.PathLike[str], *, source: str = "the file of costs") -> Costs:
    """Reads a file of costs; `source` is the origin of the path, for messages.

    Raises:
        InvalidArgumentError: The file can't be read, or has other contents.
    """
    try:
        return Costs.of(msgspec.convert(files.read_json(path, MOST_NBYTES), _File).links)
    except OSError as exc:
        actual = f"a file that can't be read ({exc.strerror})"
    except (ValueError, OverflowError) as exc:  # also msgspec's errors
        actual = f"not a file of costs ({str(exc)[:_MOST_TEXT]})"
    violation = Violation(
        kind="argument",
        rank=-1,
        field=f"{source} {os.fspath(path)!r}",
        found=actual,
        expected="what `raycollect bench --calibrate` writes",
    )
    raise refusal("costs", "", (violation,)) from None


def write(path: str | os.PathLike[str], measured: Iterable[MeasuredLink]) -> None:
    """Writes a file of costs atomically, and makes its folder; OSError: the file can't be written."""
    target = Path(path)
    target.parent.mkdir(parents=True, exist_ok=True)
    document = msgspec.to_builtins(_File(version=VERSION, links=list(measured)))
    files.write(target, f"{json.dumps(document, indent=2)}\n".encode())
