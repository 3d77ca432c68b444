"""Processes of Ray that the tests fork are like those that Ray starts."""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path

import ray

from tests.support.actors import Worker


def seen(self):
    """Whether this process was forked, and what else is told of it."""
    parent = Path(f"/proc/{os.getppid()}/cmdline").read_bytes()
    return b"/forked_workers.py\0" in parent, {
        "leads its group": os.getpgrp() == os.getpid(),
        "niceness": os.getpriority(os.PRIO_PROCESS, 0),
        "blocked": signal.pthread_sigmask(signal.SIG_BLOCK, ()),
        "handlers": {one: str(signal.getsignal(one)) for one in (signal.SIGCHLD, signal.SIGINT, signal.SIGPIPE)},
        "program": sys.argv[0],
        "paths": sys.path,
        "folder": Path.cwd(),
        "streams": [str(Path(f"/proc/self/fd/{one}").readlink()).rpartition(".")[2] for one in range(3)],
        "imported": {one.partition(".")[0] for one in sys.modules} & {"numpy", "raycollect", "tests"},
        "variables": {one for one in os.environ if one.startswith("RAY")},
    }


def test_forked_workers_are_like_others_and_variables_of_python_begin_a_process(actors):
    (forked,) = actors(Worker, 1, name="forked")  # one that no test has used
    (other,) = actors(Worker, 1, runtime_env={"env_vars": {"PYTHONHASHSEED": "1"}})
    (is_forked, looks), (is_other_forked, others_look) = ray.get([one.call.remote(seen) for one in (forked, other)])
    assert (is_forked, is_other_forked) == (True, False)
    assert looks == others_look
