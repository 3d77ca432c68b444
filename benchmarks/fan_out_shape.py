"""The tree by which a controller would reach many participants on other hosts, and what each sender sends in it.

Participants on the controller's host hear from it themselves: there, a tree only adds a hop. Of each
other host one participant, the first, is the relay. The relays form a tree of bounded degree below the controller, and
the participants of a host one below its relay (a complete k-ary tree in the order of a heap, Knuth 2.3.4.5). A message
has the programs of all whom it is for, equal ones once, and what is each participant's own.

Participants are positions in the plan. The package has no such tree.
"""

from __future__ import annotations

from collections.abc import Collection, Hashable, Iterator, Sequence
from dataclasses import dataclass

CONTROLLER = -1  # stands for the controller where positions stand for participants
DEGREE = 16
MOST_DIRECT = 32  # up to as many participants, nobody passes anything on
PLACE_NBYTES = 8  # of each participant in a message for several: its position, and which of the programs is its


@dataclass(frozen=True, slots=True)
class Sent:
    """What one sender sends for a plan."""

    messages: int
    nbytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Fanout:
    """Who hears from whom.

    Attributes:
        parents: From whom each participant hears, by position. A parent's own parent is known before it.
    """

    parents: tuple[int, ...]

    def above(self, position: int) -> Iterator[int]:
        """The participants that pass on what this one gets, the nearest first."""
        while (position := self.parents[position]) != CONTROLLER:
            yield position

    @property
    def depth(self) -> int:
        """The messages, one behind the other, until the last participant has its own."""
        return max((1 + sum(1 for _ in self.above(at)) for at in range(len(self.parents))), default=0)

    def cut_off(self, lost: Collection[int]) -> tuple[int, ...]:
        """Those who live, but below somebody who is lost; the controller has to send to them itself."""
        gone = frozenset(lost)
        return tuple(at for at in range(len(self.parents)) if at not in gone and not gone.isdisjoint(self.above(at)))

    def sent(self, programs: Sequence[bytes], own_nbytes: Sequence[int]) -> dict[int, Sent]:
        """What each sender sends, `CONTROLLER` among them; the frames around it are not counted.

        Args:
            programs: The encoded programs, by position.
            own_nbytes: The bytes that are each participant's own: its ticket and its keys.
        """
        below: list[list[int]] = [[at] for at in range(len(self.parents))]
        for at in range(len(self.parents)):
            for one in self.above(at):
                below[one].append(at)
        found: dict[int, Sent] = {}
        for at, parent in enumerate(self.parents):
            before = found.get(parent, Sent(0, 0))
            nbytes = sum(map(len, {programs[one] for one in below[at]})) + sum(own_nbytes[one] for one in below[at])
            if len(below[at]) > 1:
                nbytes += PLACE_NBYTES * len(below[at])
            found[parent] = Sent(before.messages + 1, before.nbytes + nbytes)
        return found


def build(
    hosts: Sequence[Hashable], controller_host: Hashable, *, most_direct: int = MOST_DIRECT, degree: int = DEGREE
) -> Fanout:
    """Makes the tree.

    Args:
        hosts: The host of each participant, by position.
        controller_host: That of the controller.
        most_direct: Up to as many participants hear from the controller themselves.
        degree: The most relays below a sender, and the most participants of a host below one of these.
    """
    if degree < 1:
        raise ValueError(f"a tree of degree {degree}")
    parents = [CONTROLLER] * len(hosts)
    if len(hosts) > most_direct:
        elsewhere: dict[Hashable, list[int]] = {}
        for at, host in enumerate(hosts):
            if host != controller_host:
                elsewhere.setdefault(host, []).append(at)
        _heap([CONTROLLER, *(members[0] for members in elsewhere.values())], parents, degree)
        for members in elsewhere.values():
            _heap(members, parents, degree)
    return Fanout(parents=tuple(parents))


def _heap(nodes: Sequence[int], parents: list[int], degree: int) -> None:
    for number in range(1, len(nodes)):
        parents[nodes[number]] = nodes[(number - 1) // degree]
