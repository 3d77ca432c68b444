"""Rank tables: the node and the device of each rank, in SCCL's JSON format.

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
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any, TypeVar

import msgspec
from msgspec import Meta

from raycollect.core import files
from raycollect.errors import InvalidGroupError
from raycollect.errors.text import is_path, listed, shown

VERSION = "1.0"

ENVIRONMENT_VARIABLE = "RANK_TABLE_FILE"

MOST_NBYTES = 16 << 20
"""The longest file, in bytes."""

_LIMIT = 10**9

_Schema = TypeVar("_Schema")
_Number = Annotated[int, Meta(ge=0, lt=_LIMIT)] | Annotated[str, Meta(pattern=r"\A[0-9]{1,9}\Z")]
_List = Annotated[list[Any], Meta(min_length=1)]


class _Table(msgspec.Struct, kw_only=True):
    version: Any = msgspec.UNSET
    node_list: _List


class _Node(msgspec.Struct):
    device_list: _List


class _Device(msgspec.Struct):
    device_id: _Number
    rank: _Number


class Device(msgspec.Struct, frozen=True, kw_only=True):
    """One entry of a rank table: the device's number on its node, and the rank that runs on it."""

    device_id: int
    rank: int

    def __post_init__(self) -> None:
        if any(type(number) is not int or not 0 <= number < _LIMIT for number in (self.device_id, self.rank)):
            actual = f"device_id {shown(self.device_id)} and rank {shown(self.rank)}"
            raise ValueError(f"{actual}, expected each a whole number of 0 to {_LIMIT - 1}")


@dataclass(frozen=True, slots=True, kw_only=True)
class RankTable:
    """Every rank of a group, by node and device.

    Attributes:
        nodes: The devices of each node, in the order of the file.
        source: The origin of the table, for error messages.

    Raises:
        InvalidGroupError: A node has no device, the ranks are not a permutation of 0 to n-1, or a node has a device
            twice; with every reason. So do all its constructors.
    """

    nodes: tuple[tuple[Device, ...], ...]
    source: str = field(default="rank table", compare=False)
    _positions: tuple[tuple[int, int], ...] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        problems = [] if self.nodes and all(self.nodes) else ["node_list or a device_list is empty"]
        problems += _conflicts(self.nodes)
        if problems:
            raise _refused(self.source, problems)
        positions = {d.rank: (node, d.device_id) for node, devices in enumerate(self.nodes) for d in devices}
        object.__setattr__(self, "_positions", tuple(positions[rank] for rank in range(len(positions))))

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
    def read(cls, path: str | os.PathLike[str], *, origin: str = "") -> RankTable:
        """Reads a file and checks it.

        Args:
            path: The file.
            origin: Where the path is from, for error messages.

        Raises:
            InvalidGroupError: The file can't be read, is not JSON, or the table is refused: with the file's name, and
                the position and the expected value of every problem.
        """
        if not is_path(path):
            expected = "expected the path of a file, the parsed JSON as a dict, or a RankTable"
            raise _refused("rank_table", [f"it is {shown(path)}, {expected}"])
        source = f"rank table {os.fspath(path)!r}{origin}"
        try:
            document = files.read_json(path, MOST_NBYTES)
        except OSError as exc:
            raise _refused(source, [f"the file can't be read: {exc.strerror}"]) from exc
        except ValueError as exc:
            raise _refused(source, [str(exc)]) from exc
        return cls.from_dict(document, source=source)

    @classmethod
    def from_environment(cls, environ: Mapping[str, str]) -> RankTable | None:
        """Reads the file that `RANK_TABLE_FILE` names; None if the variable is unset or empty.

        Raises:
            InvalidGroupError: See `read`; the variable is named as well.
        """
        path = environ.get(ENVIRONMENT_VARIABLE)
        return cls.read(path, origin=f" (from {ENVIRONMENT_VARIABLE})") if path else None

    @classmethod
    def from_dict(cls, document: Any, *, source: str = "rank table") -> RankTable:
        """Checks the parsed JSON. Numbers may be strings or integers; unknown fields are ignored.

        `source` names the table in error messages.

        Raises:
            InvalidGroupError: The table is refused: with the position and the expected value of every problem.
        """
        problems: list[str] = []
        nodes: list[list[Device | None]] = []
        table = _checked(document, _Table, "the table", problems)
        if table is not None and table.version not in (VERSION, 1.0):
            actual = "missing" if table.version is msgspec.UNSET else shown(table.version)
            problems.append(f"version is {actual}, expected {VERSION!r}")
        for at, entry in enumerate(table.node_list if table is not None else ()):
            node = _checked(entry, _Node, f"node_list[{at}]", problems)
            devices: list[Device | None] = []
            for index, item in enumerate(node.device_list if node is not None else ()):
                device = _checked(item, _Device, f"node_list[{at}].device_list[{index}]", problems)
                devices.append(Device(device_id=int(device.device_id), rank=int(device.rank)) if device else None)
            nodes.append(devices)
        if problems:
            raise _refused(source, problems + _conflicts(nodes))
        return cls(nodes=tuple(tuple(filter(None, devices)) for devices in nodes), source=source)

    @classmethod
    def of_device_ids(cls, device_ids: Any) -> RankTable:
        """Makes a table from the device ids of each node, as ``[[0, 1], [0, 1]]``; ranks are numbered in this order.

        Raises:
            InvalidGroupError: The value is not a list of lists, or the table is refused.
        """
        if not isinstance(device_ids, list | tuple) or not all(isinstance(node, list | tuple) for node in device_ids):
            expected = "expected one list per node, such as [[0, 1], [0, 1]]"
            raise _refused("rank table", [f"the value of device ids is {shown(device_ids)}, {expected}"])
        ranks = itertools.count()
        nodes = [[(device_id, next(ranks)) for device_id in node] for node in device_ids]
        return cls.from_dict(_document(nodes), source=f"rank table of device ids {shown(device_ids)}")

    @classmethod
    def of_places(cls, places: Sequence[ActorPlacement]) -> RankTable:
        """Makes the table of a group from its members in rank order; `assign` returns the same ranks for them.

        If each member of a node owns one device, the table has these devices; otherwise it counts from 0 on each node.
        """
        nodes = []
        for ranks in _by_node(places).values():
            owned = _owned(places, ranks) or range(len(ranks))
            nodes.append(tuple(Device(device_id=d, rank=rank) for d, rank in zip(owned, ranks, strict=True)))
        return cls(nodes=tuple(nodes))

    @property
    def world_size(self) -> int:
        """The number of ranks."""
        return len(self._positions)

    @property
    def chip_map(self) -> tuple[int, ...]:
        """The device id of each rank, as in the options of SCCL's process group."""
        return tuple(device_id for _, device_id in self._positions)

    def node_of(self, rank: int) -> int:
        """The index in `nodes` of a rank's node; ValueError: no such rank."""
        return self._position(rank)[0]

    def device_of(self, rank: int) -> int:
        """The device id of a rank; ValueError: no such rank."""
        return self._position(rank)[1]

    def _position(self, rank: int) -> tuple[int, int]:
        if not 0 <= rank < self.world_size:
            raise ValueError(f"no rank {rank}; there are 0 to {self.world_size - 1}")
        return self._positions[rank]

    def to_dict(self) -> dict[str, Any]:
        """The JSON form; numbers are strings, as in the vendor's documents."""
        return _document([[(str(device.device_id), str(device.rank)) for device in node] for node in self.nodes])

    def to_json(self) -> str:
        """The text of a file."""
        return json.dumps(self.to_dict(), indent=4) + "\n"

    def write(self, path: str | os.PathLike[str]) -> None:
        """Writes the file, and replaces an existing one.

        Raises:
            OSError: The file can't be written, or the path is a device, a FIFO, a directory or a link.
        """
        files.write(path, self.to_json().encode())

    def __str__(self) -> str:
        return f"{_count(self.world_size, 'rank')} on {_count(len(self.nodes), 'node')}"


# ---------------------------------------------------------------------------------------------- assignment


@dataclass(frozen=True, slots=True, kw_only=True)
class ActorPlacement:
    """The Ray node of an actor, and the accelerators that it owns, by their numbers on the node."""

    node_id: str
    devices: tuple[int, ...] = ()
    actor: str = ""

    @classmethod
    def of(cls, node_id: str, accelerator_ids: Mapping[str, Sequence[str]], actor: str = "") -> ActorPlacement:
        """Reads `RuntimeContext.get_accelerator_ids`; ids that are not numbers (a GPU's UUID) are omitted."""
        numbers = (
            accelerator_id
            for ids in accelerator_ids.values()
            for accelerator_id in ids
            if accelerator_id.isascii() and accelerator_id.isdecimal()
        )
        return cls(node_id=node_id, devices=tuple(map(int, numbers)), actor=actor)


def assign(table: RankTable, places: Sequence[ActorPlacement], *, group_name: str = "default") -> tuple[int, ...]:
    """Gives each actor its rank, in the order of `places`.

    The first node of the table is the Ray node of the first actor, the second is the next Ray node that appears.
    Within a node an actor gets the rank of its own device, if each actor owns exactly one device of the table;
    otherwise the actors, in their order, get the ranks in the order of the file.

    Raises:
        InvalidGroupError: The numbers of nodes or of devices on a node differ between the table and the actors.
    """
    by_node = _by_node(places)
    if [len(positions) for positions in by_node.values()] != [len(devices) for devices in table.nodes]:
        raise _misfit(table, by_node, places, group_name)
    ranks = [0] * len(places)
    for devices, positions in zip(table.nodes, by_node.values(), strict=True):
        given: Sequence[Device] = devices
        owned = _owned(places, positions)
        by_id = {device.device_id: device for device in devices}
        if by_id.keys() == set(owned):
            given = [by_id[device_id] for device_id in owned]
        for position, device in zip(positions, given, strict=True):
            ranks[position] = device.rank
    return tuple(ranks)


def _by_node(places: Sequence[ActorPlacement]) -> dict[str, list[int]]:
    by_node: dict[str, list[int]] = {}
    for position, place in enumerate(places):
        by_node.setdefault(place.node_id, []).append(position)
    return by_node


def _owned(places: Sequence[ActorPlacement], positions: Sequence[int]) -> list[int]:
    """The device of each of these actors; empty unless each actor owns exactly one, all different."""
    owned = [device for position in positions for device in places[position].devices]
    alone = all(len(places[position].devices) == 1 for position in positions)
    return owned if alone and len(set(owned)) == len(owned) else []


def _misfit(
    table: RankTable, by_node: Mapping[str, Sequence[int]], places: Sequence[ActorPlacement], group_name: str
) -> InvalidGroupError:
    nodes = [f"node_list[{at}] has {_count(len(devices), 'device')}" for at, devices in enumerate(table.nodes)]
    there = []
    for node_id, positions in by_node.items():
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


def _checked(value: Any, schema: type[_Schema], where: str, problems: list[str]) -> _Schema | None:
    """Converts a value to `schema`; None: the value is invalid, which is added to `problems`."""
    try:
        return msgspec.convert(value, schema)
    except (msgspec.ValidationError, OverflowError) as exc:
        problems.append(f"{where} is {shown(value)}: {exc}")
        return None


def _conflicts(nodes: Iterable[Sequence[Device | None]]) -> list[str]:
    """Finds duplicate devices of a node, and ranks that are not a permutation; None: an invalid entry."""
    problems = []
    places = [(at, index, device) for at, devices in enumerate(nodes) for index, device in enumerate(devices)]
    ranks = f"expected each of 0 to {len(places) - 1} once, as there are {_count(len(places), 'device')}"
    seen: dict[object, str] = {}  # the first position of each device of a node, and of each rank
    for at, index, device in places:
        if device is None:
            continue
        where = f"node_list[{at}].device_list[{index}]"
        if (first := seen.setdefault((at, device.device_id), where)) != where:
            problems.append(
                f"{where}.device_id is {device.device_id}, as in {first}, expected each device once in a node"
            )
        first = seen.setdefault(device.rank, where)
        if first != where or not 0 <= device.rank < len(places):
            also = f", as in {first}" if first != where else ""
            problems.append(f"{where}.rank is {shown(device.rank)}{also}, {ranks}")
    return problems


def _document(nodes: Iterable[Iterable[tuple[Any, Any]]]) -> dict[str, Any]:
    lists = [[{"device_id": device_id, "rank": rank} for device_id, rank in node] for node in nodes]
    return {"version": VERSION, "node_list": [{"device_list": devices} for devices in lists]}


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}{'s' * (number != 1)}"


def _refused(
    source: str, problems: Sequence[str], group_name: str = "default", verdict: str = "is refused"
) -> InvalidGroupError:
    return InvalidGroupError(
        group_name=group_name, detail=f"{source} {verdict}:\n  - {listed(problems, chr(10) + '  - ')}"
    )
