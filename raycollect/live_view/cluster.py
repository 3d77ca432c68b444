"""The live views of a Ray cluster, for any of its processes.

A view listens on the loopback interface, and its link is in a file that its user alone can read. So a task on each node
looks for the links there, and reads for the caller. A link never leaves its machine.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass, field
from http.client import HTTPException
from typing import Any

import msgspec
import ray
from ray.exceptions import NodeDiedError, RayError, TaskUnschedulableError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from raycollect.live_view import links
from raycollect.ray_bridge import ray_session

_log = logging.getLogger("raycollect")

FIND_S = 20.0
"""How long the nodes may take to say which views they have, in seconds: each has to start a process."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterView:
    """A live view of a process of the cluster, returned by `live_views`. It may be passed to other processes.

    Attributes:
        host: The address of the process's node.
        pid: Its process id.
    """

    host: str
    pid: int
    _node_id: str = field(repr=False)

    def frame(self) -> dict[str, Any]:
        """Returns the frame of now: what ``frame.json`` beside the page has.

        Raises:
            ConnectionError: The view was closed, or does not answer.
        """
        frame: dict[str, Any] = msgspec.json.decode(self.read("frame.json"))
        return frame

    def read(self, name: str) -> bytes:
        """Returns a file of the view: ``frame.json`` or ``timeline.json``.

        Raises:
            ValueError: A view has no such file.
            ConnectionError: The view was closed, or does not answer.
        """
        links.check(name)
        answer = _on(self._node_id, _read_there, self.pid, name)
        try:
            body: bytes | str = ray.get(answer, timeout=FIND_S + links.LONGEST_S)
        except RayError as exc:
            body = str(exc) or "its node is late"
        if isinstance(body, str):
            raise ConnectionError(f"the live view of process {self.pid} on {self.host} gives no answer: {body}")
        return body


def live_views() -> tuple[ClusterView, ...]:
    """Returns the live views of this Ray cluster, by node and process id.

    Any process of the cluster may ask. A task that needs no CPU looks on each node; a node that does not answer in 20 s
    counts as one without views. A view is found if its process and Ray on its node belong to the same user, as nobody
    else can read its link.
    """
    ray_session.ensure_ray()
    nodes = {node["NodeID"]: node["NodeManagerAddress"] for node in ray.nodes() if node["Alive"]}
    answers = {_on(node_id, _pids_there): node_id for node_id in nodes}
    ready, late = ray.wait(list(answers), num_returns=len(answers), timeout=FIND_S)
    for answer in late:
        ray.cancel(answer)
    views = [
        ClusterView(host=nodes[answers[answer]], pid=pid, _node_id=answers[answer])
        for answer in ready
        for pid in _pids(answer, nodes[answers[answer]])
    ]
    return tuple(sorted(views, key=lambda view: (view.host, view.pid)))


def _pids(answer: Any, host: str) -> list[int]:
    try:
        pids: list[int] = ray.get(answer)
        return pids
    except (NodeDiedError, TaskUnschedulableError):  # the node has ended meanwhile
        return []
    except RayError as exc:
        _log.warning("the live views of the node %s are unknown: %s", host, exc)
        return []


def _pids_here() -> list[int]:
    """Returns the processes of this node that have a view."""
    return list(links.published())


def _read(pid: int, name: str) -> bytes | str:
    """Returns a file of a view of this node, or why it can't be read."""
    link = links.published().get(pid)
    if link is None:
        return "it was closed"
    try:
        return links.read(link, name)
    except (OSError, HTTPException) as exc:
        return str(exc)


# Each call of `ray.remote` would be exported to all processes anew.
_in_task: Any = ray.remote(num_cpus=0, max_retries=0)
_pids_there, _read_there = _in_task(_pids_here), _in_task(_read)


def _on(node_id: str, function: Any, *args: Any) -> Any:
    """Runs a remote function in a task on a node; returns the ref."""
    where: Any = NodeAffinitySchedulingStrategy(node_id, soft=False)  # Ray's types lack it
    return function.options(scheduling_strategy=where).remote(*args)
