"""Takes the frames of the live view, when somebody looks."""

from __future__ import annotations

import os
import sys
import threading
import time
from collections import deque
from dataclasses import replace
from pathlib import Path

from raycollect.driver.controller import Controller
from raycollect.driver.group import Group
from raycollect.driver.group_status import GroupStatus
from raycollect.group import link_costs
from raycollect.live_view.frame import Frame, GroupFrame, OperationFrame, RankFrame, last_rank, operation_frame
from raycollect.live_view.stream import Streams
from raycollect.live_view.versions import publication_frames
from raycollect.observe.summary import summarize
from raycollect.observe.timeline_session import TimelineSession
from raycollect.observe.trace import Span
from raycollect.observe.whole import Process, TimelineTrace
from raycollect.ray_bridge import ray_session

FRESH_S = 0.4
"""A frame that is younger is given again, in seconds: several viewers cost no more than one."""
ANSWER_S = 0.5
"""How long a frame waits for the answers of the members of a group, in seconds."""
WINDOW_S = 5.0
"""The length of time that the operations of a frame summarize, in seconds."""
MOST_SPANS = 4096
"""How many spans of a process they summarize at most."""


class Sampler:
    """Takes frames. Any thread may call it.

    Args:
        controller: The controller whose groups are shown.
        recording: The recording of its participants, under way.
    """

    def __init__(self, controller: Controller, recording: TimelineSession) -> None:
        self._controller = controller
        self._recording = recording
        self._streams = Streams()
        self._costs = link_costs.current()
        self._processes: dict[tuple[str, int], tuple[Process, deque[Span]]] = {}
        self._lock = threading.Lock()
        self._taken_s = -FRESH_S
        self._frame: Frame | None = None

    def frame(self) -> Frame:
        """Returns the frame of now, or one that is nearly as new."""
        with self._lock:
            if self._frame is None or time.monotonic() - self._taken_s >= FRESH_S:
                self._frame = self._take()
                self._taken_s = time.monotonic()
            return self._frame

    def _take(self) -> Frame:
        groups = [Group(self._controller, *declared) for declared in self._controller.groups.declared()]
        statuses = [group.status(ANSWER_S) for group in groups]
        trace = self._recording.recent(ANSWER_S)
        now_s = trace.ended_s
        self._add(trace, now_s)
        hosts = {
            group.name: len({member.host for member in status.members})
            for group, status in zip(groups, statuses, strict=True)
        }
        return Frame(
            at_s=time.time(),
            host=ray_session.node_address(),
            pid=os.getpid(),
            program=Path(sys.argv[0]).name or "python",
            groups=tuple(self._group(*pair, now_s) for pair in zip(groups, statuses, strict=True)),
            operations=self._operations(now_s, hosts),
            publications=publication_frames(ANSWER_S),
            missing=tuple(map(str, trace.missing)),
        )

    def _add(self, trace: TimelineTrace, now_s: float) -> None:
        for process in trace.processes:
            key = process.host, process.pid
            _, spans = self._processes.get(key, (process, deque[Span](maxlen=MOST_SPANS)))
            spans.extend(process.spans)
            self._processes[key] = replace(process, spans=()), spans
            self._streams.add(key, process.spans)
        self._streams.forget(now_s)

    def _operations(self, now_s: float, hosts: dict[str, int]) -> tuple[OperationFrame, ...]:
        full = [spans[0].begin_s for _, spans in self._processes.values() if len(spans) == MOST_SPANS]
        began_s = max(self._recording.began_s, now_s - WINDOW_S, *full)  # before that, spans are missing
        for key, (_, spans) in list(self._processes.items()):
            while spans and spans[0].end_s < began_s:
                spans.popleft()
            if not spans:
                del self._processes[key]
        processes = tuple(replace(process, spans=tuple(spans)) for process, spans in self._processes.values())
        summary = summarize(TimelineTrace(began_s=began_s, ended_s=now_s, processes=processes))
        duration_s = max(now_s - began_s, FRESH_S)
        return tuple(operation_frame(row, duration_s, hosts.get(row.group, 0), self._costs) for row in summary.rows)

    def _group(self, group: Group, status: GroupStatus, now_s: float) -> GroupFrame:
        last = last_rank([member.awaited_s for member in status.members])
        return GroupFrame(
            name=group.name,
            backend=group.backend,
            state=status.state,
            detail=status.detail,
            epoch=group.epoch,
            ranks=tuple(
                RankFrame(
                    rank=member.rank,
                    actor=member.actor,
                    host=member.host,
                    pid=member.pid,
                    device=member.device,
                    state=member.state,
                    collectives=member.places,
                    awaited_s=member.awaited_s,
                    is_last=member.rank == last,
                    stack=member.stack,
                    stream=self._streams.of((member.host, member.pid), now_s),
                )
                for member in status.members
            ),
        )
