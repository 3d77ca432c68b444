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
from typing import Any

from raycollect.errors import InvalidArgumentError, Violation, refusal
from raycollect.planner.topology import BETWEEN, INSIDE, Link

__all__ = [
    "ENVIRONMENT_VARIABLE",
    "PLACES",
    "VERSION",
    "Costs",
    "Measured",
    "current",
    "default_path",
    "given",
    "read",
    "table",
    "write",
]

ENVIRONMENT_VARIABLE = "RAYCOLLECT_COSTS"
"""Names the file, instead of the default place."""

VERSION = 1
"""The one version of the form."""

PLACES: dict[str, tuple[str, ...]] = {"inside": ("shm", "tcp"), "between": ("tcp",)}
"""Where two ranks may be to each other: on one host, or on two -> the backends whose link stands for it, best first."""

_DEFAULTS = {"inside": INSIDE, "between": BETWEEN}


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """One link, and where its numbers are from.

    Attributes:
        place: A key of `PLACES`.
        backend: Over which backend bytes moved.
        link: What it costs.
        how: How the numbers were found, for a person.

    Raises:
        ValueError: There is no such place.
    """

    place: str
    backend: str
    link: Link
    how: str = ""

    def __post_init__(self) -> None:
        if self.place not in PLACES:
            raise ValueError(f"place {self.place!r} is none of {', '.join(PLACES)}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Costs:
    """What the planner counts with.

    Attributes:
        inside: What moving bytes costs between ranks of one host.
        between: The same between ranks of different hosts.
        measured: All links that the file holds.
    """

    inside: Link = INSIDE
    between: Link = BETWEEN
    measured: tuple[Measured, ...] = ()

    @classmethod
    def of(cls, measured: Iterable[Measured]) -> Costs:
        """Takes for each place the link of the first of its backends that was measured, else the default."""
        links = tuple(measured)
        found = {(one.place, one.backend): one.link for one in links}
        chosen = {
            place: next((found[place, name] for name in names if (place, name) in found), _DEFAULTS[place])
            for place, names in PLACES.items()
        }
        return cls(**chosen, measured=links)


def given(*, latency_s: float, bandwidth: float) -> Measured:
    """The link between hosts as somebody knows it, in seconds and bytes per second."""
    link = Link(latency_s=latency_s, bandwidth=bandwidth)
    return Measured(place="between", backend="tcp", link=link, how="given by hand, not measured")


def table(measured: Iterable[Measured]) -> list[str]:
    """What was found, and what stands by default, as the lines of a table."""
    rows = [(one.place, one.backend, one.link, one.how) for one in measured]
    there = {place for place, *_ in rows}
    rows += [(place, "", link, "the default") for place, link in _DEFAULTS.items() if place not in there]
    head = f"{'hosts':<8} {'over':<6} {'latency':>10} {'bandwidth':>12}  how"
    return [head] + [
        f"{place:<8} {backend:<6} {link.latency_s * 1e6:>7.1f} us {link.bandwidth / 1e9:>7.2f} GB/s  {how}"
        for place, backend, link, how in rows
    ]


def default_path(environ: Mapping[str, str] = os.environ) -> Path:
    """Where the file is: where `RAYCOLLECT_COSTS` says, else under the user's configuration."""
    named = environ.get(ENVIRONMENT_VARIABLE)
    if named:
        return Path(named)
    return Path(environ.get("XDG_CONFIG_HOME") or Path.home() / ".config") / "raycollect" / "costs.json"


def current(environ: Mapping[str, str] = os.environ) -> Costs:
    """Reads the file; the defaults where there is none.

    A file at the default place that can't be used is told by a warning, and the defaults stand.

    Raises:
        InvalidArgumentError: The file that `RAYCOLLECT_COSTS` names can't be read, or holds something else.
    """
    path = default_path(environ)
    if environ.get(ENVIRONMENT_VARIABLE):
        return read(path, source=ENVIRONMENT_VARIABLE)
    if not path.exists():
        return Costs()
    try:
        return read(path)
    except InvalidArgumentError as exc:
        (violation,) = exc.violations
        warnings.warn(f"{violation.field} is {violation.found}: the defaults stand", RuntimeWarning, stacklevel=2)
        return Costs()


def read(path: str | os.PathLike[str], *, source: str = "the file of costs") -> Costs:
    """Reads a file of costs.

    Args:
        path: The file.
        source: What named it, for the error.

    Raises:
        InvalidArgumentError: It can't be read, or holds something else; a ValueError as well.
    """
    try:
        return Costs.of(_parsed(json.loads(Path(path).read_text(encoding="utf-8"))))
    except OSError as exc:
        found = f"a file that can't be read ({exc.strerror})"
    except (ValueError, TypeError, LookupError, AttributeError, RecursionError) as exc:
        found = f"not a file of costs ({type(exc).__name__}: {exc})"
    violation = Violation(
        kind="argument",
        rank=-1,
        field=f"{source} {os.fspath(path)!r}",
        found=found,
        expected="what `raycollect bench --calibrate` writes",
    )
    raise refusal("costs", "", (violation,)) from None


def write(path: str | os.PathLike[str], measured: Iterable[Measured]) -> None:
    """Writes a file of costs whole, or not at all; makes its folder.

    Raises:
        OSError: It can't be written.
    """
    links = [
        {
            "place": one.place,
            "backend": one.backend,
            "latency_s": one.link.latency_s,
            "bandwidth": one.link.bandwidth,
            "how": one.how,
        }
        for one in measured
    ]
    target = Path(path)
    target.parent.mkdir(parents=True, exist_ok=True)
    unfinished = target.with_name(f"{target.name}.{os.getpid()}")
    unfinished.write_text(json.dumps({"version": VERSION, "links": links}, indent=2) + "\n", encoding="utf-8")
    unfinished.replace(target)


def _parsed(document: Any) -> list[Measured]:
    """The links of a document, each of which is one of its kind."""
    if document["version"] != VERSION:
        raise ValueError(f"version {document['version']!r}, this raycollect reads {VERSION}")
    found = [
        Measured(
            place=one["place"],
            backend=str(one["backend"]),
            link=Link(latency_s=float(one["latency_s"]), bandwidth=float(one["bandwidth"])),
            how=str(one.get("how", "")),
        )
        for one in document["links"]
    ]
    repeated = {(a.place, a.backend) for at, a in enumerate(found) for b in found[:at] if _same(a, b)}
    if repeated:
        raise ValueError(f"given twice: {sorted(repeated)}")
    return found


def _same(one: Measured, other: Measured) -> bool:
    return (one.place, one.backend) == (other.place, other.backend)
