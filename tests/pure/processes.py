"""Worker processes without Ray, for tests of what processes do with each other."""

from __future__ import annotations

import itertools
import threading
from concurrent.futures import Future
from multiprocessing.connection import Connection
from typing import Any

from tests.pure.communicators import FORKS

_names = itertools.count(1)


class Process:
    """A process that runs functions, one after the other; `start` gives a future of each.

    Attributes:
        warm: The backends that it has made a group on, where that matters to a test.
    """

    def __init__(self):
        self.warm: set[str] = set()
        self._pipe, theirs = FORKS.Pipe()
        self.process = FORKS.Process(target=_work, args=(theirs,), daemon=True)
        self.process.start()
        theirs.close()
        self._lock = threading.Lock()

    def start(self, function, *args) -> Future[Any]:
        """Calls a function of a module in the process."""
        future: Future[Any] = Future()
        threading.Thread(target=self._serve, args=(future, function, args), daemon=True).start()
        return future

    def call(self, function, *args):
        """Like `start`, and waits; what the function raised is raised here."""
        return self.start(function, *args).result(60)

    def kill(self):
        """Ends it as a crash would."""
        self.process.kill()
        self.process.join()

    def close(self):
        self._pipe.close()
        self.process.join(5)
        self.kill()

    def _serve(self, future, function, args):
        with self._lock:
            try:
                self._pipe.send((function, args))
                ok, value = self._pipe.recv()
            except (EOFError, OSError) as exc:
                self.process.join()  # its end of the pipe is closed before it counts as dead
                ok, value = False, exc
        future.set_result(value) if ok else future.set_exception(value)


class Crew:
    """As many processes as a test asks for, kept for the next one.

    Attributes:
        rendezvous: Where the members of this test's groups meet; set for each test.
    """

    def __init__(self):
        self._idle: list[Process] = []
        self._used: list[Process] = []
        self.rendezvous = ""

    def take(self, count):
        while len(self._idle) < count:
            self._idle.append(Process())
        taken, self._idle = self._idle[:count], self._idle[count:]
        self._used += taken
        return taken

    def group(self, count, backend="auto", name="", timeout_ms=20_000):
        """Processes that have joined a group: rank r is the r-th."""
        name = name or f"group-{next(_names)}"
        taken = self.take(count)
        joining = [
            one.start(join, count, rank, backend, name, timeout_ms, self.rendezvous) for rank, one in enumerate(taken)
        ]
        for one in joining:
            one.result(60)
        return Group(taken, name)

    def rest(self):
        """After a test: what lives goes back, with its groups destroyed."""
        used, self._used = self._used, []
        for one in used:
            try:
                one.call(leave_all)
            except (EOFError, OSError):
                if one.process.is_alive():
                    raise
            else:
                self._idle.append(one)

    def close(self):
        for one in self._idle + self._used:
            one.process.kill()
        for one in self._idle + self._used:
            one.close()


class Group:
    """Processes of one group."""

    def __init__(self, processes, name):
        self.processes = processes
        self.name = name

    def start(self, rank, function, *args):
        """Calls ``function(group_name, rank, *args)`` on one rank."""
        return self.processes[rank].start(function, self.name, rank, *args)

    def run(self, function, *args, ranks=None):
        """Calls it on ranks at once; what one raises is in the list like what it returns."""
        chosen = range(len(self.processes)) if ranks is None else ranks
        return [outcome(one) for one in [self.start(rank, function, *args) for rank in chosen]]

    def must(self, function, *args, ranks=None):
        """Like `run`; raises the first error."""
        results = self.run(function, *args, ranks=ranks)
        for one in results:
            if isinstance(one, BaseException):
                raise one
        return results


def outcome(future):
    """What a call gave, or raised."""
    error = future.exception(60)
    return future.result() if error is None else error


def join(world_size, rank, backend, name, timeout_ms, rendezvous):
    from raycollect.member import init

    init.init_collective_group(world_size, rank, backend, name, timeout_ms, rendezvous=rendezvous)


def leave_all():
    from raycollect.member.runtime import this_runtime

    process_groups = this_runtime().process_groups
    for process_group in list(process_groups._process_groups.values()):
        process_groups.remove(process_group)
        process_group.close()
    for fading in process_groups.notices.values():
        fading.end()
    process_groups.notices.clear()


def _work(pipe: Connection) -> None:
    while True:
        try:
            function, args = pipe.recv()
        except EOFError:
            return
        try:
            answer = (True, function(*args))
        except BaseException as exc:
            answer = (False, exc)
        pipe.send(answer)
