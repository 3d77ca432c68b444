"""Rank tables: which rank runs on which device of which node, in the JSON form of SCCL.

::

    {"version": "1.0",
     "node_list": [{"device_list": [{"device_id": "0", "rank": "0"},
                                    {"device_id": "1", "rank": "1"}]}]}

Pure: the standard library only. `docs/command-line.md` is the user's page.
"""

from __future__ import annotations

import itertools
import json
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from raycollect.core import files
from raycollect.errors import InvalidGroupError
from raycollect.errors.text import is_path, listed, shown

VERSION = "1.0"

ENVIRONMENT_VARIABLE = "RANK_TABLE_FILE"

MOST_NBYTES = 16 << 20
"""The longest file, in bytes."""

_LIMIT = 10**9
_DIGITS = re.compile(r"[0-9]{1,9}")
_WHOLE = f"a whole number of 0 to {_LIMIT - 1}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Device:
    """One entry of a rank table: the device's number on its node, and the rank that runs on it."""

    device_id: int
    rank: int

    def __post_init__(self) -> None:
        if any(type(value) is not int or _whole(value) is None for value in (self.device_id, self.rank)):
            raise ValueError(f"device_id {shown(self.device_id)} and rank {shown(self.rank)}, expected each {_WHOLE}")


@dataclass(frozen=True, slots=True, kw_only=True)
class RankTable:
    """Every rank of a group, by node and device.

    Attributes:
        nodes: The devices of each node, in the order of the file.
        source: Where the table came from, for an error.

    Raises:
        InvalidGroupError: No node or no device, ranks that are not a permutation of 0 to n-1, or a device twice in one
            node; with every reason. So do all its constructors.
    """

    nodes: tuple[tuple[Device, ...], ...]
    source: str = field(default="rank table", compare=False)
    _positions: tuple[tuple[int, int], ...] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        problems = [f"node_list[{at}].device_list is empty" for at, node in enumerate(self.nodes) if not node]
        problems += [] if self.nodes else ["node_list is empty"]
        problems += _conflicts(self.nodes)
        if problems:
            raise _refused(self.source, problems)
        found = {d.rank: (node, d.device_id) for node, devices in enumerate(self.nodes) for d in devices}
        object.__setattr__(self, "_positions", tuple(found[rank] for rank in range(len(found))))

    @classmethod
    def coerce(cls, value: Any) -> RankTable:
        """Accepts a `RankTable`, the path of a file, or the parsed JSON as a dict.

        Raises:
            InvalidGroupError: It is none of these, or the table is refused.
        """
        if isinstance(value, RankTable):
            return value
        return cls.from_dict(value) if isinstance(value, Mapping) else cls.read(value)

    @classmethod
    def read(cls, path: str | os.PathLike[str]) -> RankTable:
        """Reads a file and checks it.

        Raises:
            InvalidGroupError: It can't be read, is not JSON, or the table is refused: with the file's name, and where
                in it and what would be right for every problem.
        """
        if not is_path(path):
            expected = "the path of a file, the parsed JSON as a dict, or a RankTable"
            raise _refused("rank_table", [_problem("it", path, expected)])
        return cls._read(path, f"rank table {os.fspath(path)!r}")

    @classmethod
    def from_environment(cls, environ: Mapping[str, str]) -> RankTable | None:
        """Reads the file that `RANK_TABLE_FILE` names; None where the variable is unset or empty.

        Raises:
            InvalidGroupError: As `read`; the variable is named as well.
        """
        path = environ.get(ENVIRONMENT_VARIABLE)
        return cls._read(path, f"rank table {path!r} (from {ENVIRONMENT_VARIABLE})") if path else None

    @classmethod
    def _read(cls, path: str | os.PathLike[str], source: str) -> RankTable:
        try:
            with Path(path).open("rb") as file:
                text = file.read(MOST_NBYTES + 1)
            document = json.loads(text.decode("utf-8-sig")) if len(text) <= MOST_NBYTES else None  # a mark may be first
        except OSError as exc:
            raise _refused(source, [f"the file can't be read: {exc.strerror}"]) from exc
        except (ValueError, RecursionError) as exc:
            raise _refused(source, [f"the file is not JSON in UTF-8: {exc}"]) from exc
        if len(text) > MOST_NBYTES:
            raise _refused(source, [f"the file is longer than {MOST_NBYTES} bytes"])
        return cls.from_dict(document, source=source)

    @classmethod
    def from_dict(cls, document: Any, *, source: str = "rank table") -> RankTable:
        """Checks the parsed JSON. Numbers may be strings or integers; fields that the form does not have are ignored.

        `source` is what to call it in an error.

        Raises:
            InvalidGroupError: With where and what would be right for every problem.
        """
        problems: list[str] = []
        nodes = _nodes(document, problems)
        if problems:
            raise _refused(source, problems + _conflicts(nodes))
        return cls(nodes=tuple(tuple(device for device in node if device) for node in nodes), source=source)

    @classmethod
    def of_device_ids(cls, device_ids: Any) -> RankTable:
        """Makes a table of the device ids of each node: ``[[0, 1], [0, 1]]``; ranks are counted through in this order.

        Raises:
            InvalidGroupError: They are not lists in a list, or the table is refused.
        """
        if not _is_list(device_ids) or not all(map(_is_list, device_ids)):
            expected = "one list per node, such as [[0, 1], [0, 1]]"
            raise _refused("rank table", [_problem("the value of device ids", device_ids, expected)])
        ranks = itertools.count()
        lists = [[{"device_id": device, "rank": next(ranks)} for device in node] for node in device_ids]
        document = {"version": VERSION, "node_list": [{"device_list": devices} for devices in lists]}
        return cls.from_dict(document, source=f"rank table of device ids {shown(device_ids)}")

    @classmethod
    def of_places(cls, places: Sequence[Place]) -> RankTable:
        """Makes the table of a group from its members in rank order; `assign` gives these the same ranks again.

        If the members of a node own one device each, the table has these; otherwise it counts from 0 on each node.
        """
        nodes = []
        for ranks in _by_node(places).values():
            owned = _owned(places, ranks) or range(len(ranks))
            nodes.append(tuple(Device(device_id=d, rank=rank) for d, rank in zip(owned, ranks, strict=True)))
        return cls(nodes=tuple(nodes))

    @property
    def world_size(self) -> int:
        """How many ranks it has."""
        return len(self._positions)

    @property
    def chip_map(self) -> tuple[int, ...]:
        """The device id of each rank, as the options of SCCL's process group have it."""
        return tuple(device_id for _, device_id in self._positions)

    def node_of(self, rank: int) -> int:
        """The index in `nodes` of a rank's node.

        Raises:
            ValueError: There is no such rank.
        """
        return self._position(rank)[0]

    def device_of(self, rank: int) -> int:
        """The device id of a rank.

        Raises:
            ValueError: There is no such rank.
        """
        return self._position(rank)[1]

    def _position(self, rank: int) -> tuple[int, int]:
        if not 0 <= rank < self.world_size:
            raise ValueError(f"no rank {rank}; there are 0 to {self.world_size - 1}")
        return self._positions[rank]

    def to_dict(self) -> dict[str, Any]:
        """The JSON form; numbers are strings, as the vendor's documents have them."""
        lists = [[{"device_id": str(d.device_id), "rank": str(d.rank)} for d in node] for node in self.nodes]
        return {"version": VERSION, "node_list": [{"device_list": devices} for devices in lists]}

    def to_json(self) -> str:
        """The text of a file."""
        return json.dumps(self.to_dict(), indent=4) + "\n"

    def write(self, path: str | os.PathLike[str]) -> None:
        """Writes the file; one that exists is replaced.

        Raises:
            OSError: It can't be written, or the path names a device, a FIFO, a directory or a link.
        """
        files.write(path, self.to_json().encode())

    def __str__(self) -> str:
        return f"{_count(self.world_size, 'rank')} on {_count(len(self.nodes), 'node')}"


# ---------------------------------------------------------------------------------------------- assignment


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """Where an actor is: its Ray node, and the accelerators that it owns, by their numbers on the node."""

    node_id: str
    devices: tuple[int, ...] = ()
    actor: str = ""

    @classmethod
    def of(cls, node_id: str, accelerator_ids: Mapping[str, Sequence[str]], actor: str = "") -> Place:
        """Reads `RuntimeContext.get_accelerator_ids`; ids that are not numbers (a GPU's UUID) are left out."""
        given = [_whole(one) for ids in accelerator_ids.values() for one in ids]
        return cls(node_id=node_id, devices=tuple(one for one in given if one is not None), actor=actor)


def assign(table: RankTable, places: Sequence[Place], *, group_name: str = "default") -> tuple[int, ...]:
    """Gives each actor its rank, in the order of `places`.

    The first node of the table is the Ray node of the first actor, the second the next Ray node that appears.
    Within a node an actor gets the rank of the device that it owns, if each owns exactly one and these are the table's;
    otherwise the actors, in their order, get the ranks in the order of the file.

    Raises:
        InvalidGroupError: The table has not as many nodes, or devices on a node, as there are.
    """
    found = _by_node(places)
    if [len(positions) for positions in found.values()] != [len(devices) for devices in table.nodes]:
        raise _misfit(table, found, places, group_name)
    ranks = [0] * len(places)
    for devices, positions in zip(table.nodes, found.values(), strict=True):
        given: Sequence[Device] = devices
        owned = _owned(places, positions)
        by_id = {device.device_id: device for device in devices}
        if by_id.keys() == set(owned):
            given = [by_id[device_id] for device_id in owned]
        for position, device in zip(positions, given, strict=True):
            ranks[position] = device.rank
    return tuple(ranks)


def _by_node(places: Sequence[Place]) -> dict[str, list[int]]:
    found: dict[str, list[int]] = {}
    for position, place in enumerate(places):
        found.setdefault(place.node_id, []).append(position)
    return found


def _owned(places: Sequence[Place], positions: Sequence[int]) -> list[int]:
    """The device of each of these actors; empty unless each owns exactly one, and no two the same."""
    owned = [device for position in positions for device in places[position].devices]
    alone = all(len(places[position].devices) == 1 for position in positions)
    return owned if alone and len(set(owned)) == len(owned) else []


def _misfit(
    table: RankTable, found: Mapping[str, Sequence[int]], places: Sequence[Place], group_name: str
) -> InvalidGroupError:
    nodes = [f"node_list[{at}] has {_count(len(devices), 'device')}" for at, devices in enumerate(table.nodes)]
    there = []
    for node_id, positions in found.items():
        names = listed(places[position].actor or f"actors[{position}]" for position in positions)
        there.append(f"Ray node {node_id} has {_count(len(positions), 'actor')} ({names})")
    pairs = itertools.zip_longest(nodes, there)
    problems = [f"{want or 'no node of the table is left'}; {has or 'no actor is left for it'}" for want, has in pairs]
    expected = (
        "expected as many actors on each node as the table has devices there; the table's nodes are matched with the "
        "actors' nodes in the order in which these appear in the list of actors"
    )
    return _refused(f"{table.source}, {table},", [expected, *problems], group_name, "does not fit the actors")


# ---------------------------------------------------------------------------------------------- checks

_Parsed = Sequence[Sequence[Device | None]]
"""The devices of each node in the order of the file; None: the entry could not be read."""


def _nodes(document: Any, problems: list[str]) -> _Parsed:
    version, node_list = _fields(document, "", ("version", "node_list"), problems)
    if version not in (None, VERSION, 1.0):
        problems.append(_problem("version", version, f"{VERSION!r}, the only one there is"))
    nodes = []
    for at, node in _entries(node_list, "node_list", "node", problems):
        (device_list,) = _fields(node, f"{at}.", ("device_list",), problems)
        entries = _entries(device_list, f"{at}.device_list", "device", problems)
        nodes.append([_device(entry, f"{where}.", problems) for where, entry in entries])
    return nodes


def _fields(value: Any, where: str, names: Sequence[str], problems: list[str]) -> list[Any]:
    if not isinstance(value, Mapping):
        problems.append(_problem(where.rstrip(".") or "the whole", value, f"an object with {' and '.join(names)}"))
        return [None] * len(names)
    there = listed(name if isinstance(name, str) and len(name) <= 40 else shown(name) for name in value) or "nothing"
    absent = [name for name in names if value.get(name) is None]
    problems += [f"{where}{name} is missing; what is there: {there}" for name in absent]
    return [value.get(name) for name in names]


def _entries(value: Any, where: str, noun: str, problems: list[str]) -> list[tuple[str, Any]]:
    if value is not None and (not _is_list(value) or not value):
        problems.append(_problem(where, value, f"a list of at least one {noun}"))
    return [(f"{where}[{index}]", entry) for index, entry in enumerate(value)] if _is_list(value) else []


def _device(entry: Any, where: str, problems: list[str]) -> Device | None:
    values = _fields(entry, where, ("device_id", "rank"), problems)
    device_id, rank = map(_whole, values)
    for name, value, number in zip(("device_id", "rank"), values, (device_id, rank), strict=True):
        if value is not None and number is None:
            problems.append(_problem(f"{where}{name}", value, _WHOLE))
    return None if device_id is None or rank is None else Device(device_id=device_id, rank=rank)


def _conflicts(nodes: _Parsed) -> list[str]:
    problems = []
    count = sum(map(len, nodes))
    ranks = f"each of 0 to {count - 1} once, as there are {_count(count, 'device')}"
    seen: dict[object, str] = {}  # where each device of a node, and each rank, comes first
    for at, devices in enumerate(nodes):
        for index, device in enumerate(devices):
            if device is None:
                continue
            where = f"node_list[{at}].device_list[{index}]"
            first = seen.setdefault((at, device.device_id), where)
            if first != where:
                expected = "each device once in a node"
                problems.append(_problem(f"{where}.device_id", device.device_id, expected, f", as in {first}"))
            first = seen.setdefault(device.rank, where)
            if first != where or device.rank >= count:
                also = f", as in {first}" if first != where else ""
                problems.append(_problem(f"{where}.rank", device.rank, ranks, also))
    return problems


def _whole(value: Any) -> int | None:
    if isinstance(value, str):
        value = int(value) if _DIGITS.fullmatch(value) else None
    return value if type(value) is int and 0 <= value < _LIMIT else None  # a bool is an int, too


def _is_list(value: Any) -> bool:
    return isinstance(value, (list, tuple))


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}{'s' * (number != 1)}"


def _problem(where: str, found: Any, expected: str, also: str = "") -> str:
    return f"{where} is {shown(found)}{also}, expected {expected}"


def _refused(
    source: str, problems: Sequence[str], group_name: str = "default", verdict: str = "is refused"
) -> InvalidGroupError:
    return InvalidGroupError(
        group_name=group_name, detail=f"{source} {verdict}:\n  - {listed(problems, chr(10) + '  - ')}"
    )
