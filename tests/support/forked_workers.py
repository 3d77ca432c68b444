"""Processes of Ray that are forked from one that has imported what they will, as that is most of what a start takes.

Ray's raylet runs `fork_request.py` instead of its own program: it asks the process that `serving` has started for a
fork, which gets its arguments, environment, output and priority, and becomes a worker by Ray's own program. What most
workers import is there before, Ray and raycollect too: it has read no variable of the worker's environment but those
that are the same, and begun no thread.
"""

from __future__ import annotations

import json
import marshal
import os
import signal
import socket
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from typing import Any

_READ_BY_PYTHON = ("PYTHON", "LD_")
_READ_BY_RAY = ("RAY_",)
"""What the variables begin with that are read before a fork: those of Ray have the id of the job, for one."""

LOADED_FIRST = (
    "numpy",
    "raycollect.backends.shm",
    "raycollect.backends.tcp",
)
LOADED_WITH_RAY = (
    "pydantic.v1",  # for the first object that Ray reads
    "ray._common.pydantic_compat",
    "ray._private.workers.default_worker",
    "raycollect.member.mixin",
)
"""What forks have from the beginning. None of it draws an id of Ray's: all would then draw the same."""

_MOST_FORKING = 2
"""For how many jobs: that of the tests, and none, as Ray starts workers before it knows for which job."""
_LARGEST_NBYTES = 1 << 20


@contextmanager
def serving() -> Iterator[str]:
    """Starts the process that forks; gives the program that a raylet is to run for a worker."""
    import subprocess
    import tempfile
    from pathlib import Path

    from ray._private.workers import default_worker

    import raycollect
    from tests.support import fork_request

    with tempfile.TemporaryDirectory() as folder:
        # Below a method there are files of Ray's alone: what looks for the methods that run takes it for one of them.
        program = Path(folder, "ray/_private/forked_workers.py")
        program.parent.mkdir(parents=True)
        program.symlink_to(__file__)
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listening:
            listening.bind(f"{folder}/forks")
            listening.listen()
            where = Path(raycollect.__file__).parents[1]  # no other than that of the tests
            command = [sys.executable, program, str(listening.fileno()), where]
            descriptors = [listening.fileno()]
            process = subprocess.Popen(command, stdin=subprocess.PIPE, pass_fds=descriptors, start_new_session=True)
        told = {fork_request.FORKS: f"{folder}/forks", fork_request.PROGRAM: default_worker.__file__}
        os.environ.update(told)
        with process:
            yield fork_request.__file__
            process.communicate()
        for name in told:
            del os.environ[name]


def serve(listening: socket.socket) -> dict[str, Any] | None:
    """Passes on what is asked for until standard input ends: then None. In a worker: what was asked for."""
    import selectors

    os.environ["OMP_NUM_THREADS"] = "1"  # numpy begins no thread, which a fork would not have
    load(LOADED_FIRST)
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # the kernel forgets those that have ended
    read_by_python = _among(os.environ, _READ_BY_PYTHON)
    forking: dict[str, socket.socket] = {}
    with selectors.DefaultSelector() as ready:
        ready.register(listening, selectors.EVENT_READ)
        ready.register(0, selectors.EVENT_READ)
        while all(key.fd != 0 for key, _ in ready.select()):
            sock, _ = listening.accept()
            with sock:
                told, descriptors, _, _ = socket.recv_fds(sock, _LARGEST_NBYTES, 3)
                environment = marshal.loads(told)["environment"]
                read_by_ray = _among(environment, _READ_BY_RAY)
                is_python_the_same = _among(environment, _READ_BY_PYTHON) == read_by_python
                key = json.dumps(read_by_ray, sort_keys=True) if is_python_the_same else ""
                if key and key not in forking and len(forking) < _MOST_FORKING:
                    forking[key], theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
                    if os.fork() == 0:
                        for one in (sock, listening, *forking.values()):
                            one.close()
                        for descriptor in descriptors:
                            os.close(descriptor)
                        return _fork(theirs, read_by_ray)
                    theirs.close()
                if key in forking:
                    socket.send_fds(forking[key], [told], descriptors)
                sock.send(b"y" if key in forking else b"n")
            for descriptor in descriptors:
                os.close(descriptor)
    return None


def _fork(asking: socket.socket, read_by_ray: dict[str, str]) -> dict[str, Any] | None:
    """Forks workers that begin with the same variables of Ray's."""
    import gc

    os.environ.update(read_by_ray)
    load(LOADED_WITH_RAY)
    gc.collect()
    gc.freeze()
    with asking:
        while True:
            told, descriptors, _, _ = socket.recv_fds(asking, _LARGEST_NBYTES, 3)
            if not told:
                return None
            if os.fork() == 0:
                for number, descriptor in enumerate(descriptors):
                    os.dup2(descriptor, number)
                    os.close(descriptor)
                return marshal.loads(told)
            for descriptor in descriptors:
                os.close(descriptor)


def work(asked: dict[str, Any]) -> None:
    """In a fork: becomes the worker."""
    import types

    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_SETMASK, asked["blocked"])
    os.setpriority(os.PRIO_PROCESS, 0, asked["niceness"])
    if asked["leads"]:
        os.setpgid(0, 0)  # with a worker, Ray ends the group that it leads
    os.environ.clear()
    os.environ.update(asked["environment"])
    os.chdir(asked["folder"])
    program = asked["program"]
    sys.argv = [program, *asked["arguments"]]
    sys.path.insert(1, os.path.dirname(os.path.realpath(program)))  # noqa: PTH120 - each import counts here
    main = sys.modules["__main__"] = types.ModuleType("__main__")
    main.__file__ = program
    with open(program, "rb") as source:  # noqa: PTH123 - the same
        code = compile(source.read(), program, "exec")
    exec(code, vars(main))


def load(names: tuple[str, ...]) -> None:
    from importlib import import_module

    for name in names:
        with suppress(ImportError):
            import_module(name)


def _among(environment: Mapping[str, str], beginnings: tuple[str, ...]) -> dict[str, str]:
    return {name: value for name, value in environment.items() if name.startswith(beginnings)}


def main() -> None:
    del sys.path[0]  # this folder, in which workers look for nothing
    sys.path.insert(0, sys.argv[2])
    with socket.socket(fileno=int(sys.argv[1])) as listening:
        asked = serve(listening)
    if asked is not None:
        sys.path.remove(sys.argv[2])
        work(asked)


if __name__ == "__main__":
    main()
