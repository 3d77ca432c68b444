"""Ray that starts by itself, and one that was shut down; groups of several hosts are in `tests/hosts`."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import ray

from raycollect.driver.controller import Controller

ROOT = Path(__file__).parents[2]

LIMIT_S = 280
"""How long a program may take on a machine that is shared, in seconds."""

pytestmark = pytest.mark.timeout(LIMIT_S + 20)


def run(*arguments, **variables):
    """Runs a program without any cluster address; returns what it printed."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith("RAY_")}
    done = subprocess.run(
        [sys.executable, *arguments],
        cwd=ROOT,
        env={**environment, "PYTHONPATH": str(ROOT), **variables},
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_the_first_call_starts_ray(monkeypatch):
    class Started(Exception):
        pass

    def start():
        raise Started

    monkeypatch.setattr("ray._private.worker.Worker.connected", property(lambda self: False))
    monkeypatch.setattr(ray, "init", start)
    with pytest.raises(Started):
        Controller.current()


_STALE = """
import threading
import numpy as np, ray
import raycollect as col
from raycollect.driver.controller import Controller
from tests.support.actors import Buffers

def start():
    ray.init(address="local", num_cpus=2, include_dashboard=False)

def errors_of(calls):
    for name, call in calls.items():
        try:
            call()
        except col.errors.RaycollectError as exc:
            print(name, type(exc).__name__, ray.is_initialized())

start()
workers = [ray.remote(Buffers).options(num_cpus=0).remote() for _ in range(2)]
refs = [one.get_buffer.remote() for one in workers]
handle, put = ray.get(refs[0]), ray.put(1)
group = col.declare_collective_group(workers, group_name="g")
col.allreduce_refs(refs, "g")
ray.shutdown()
print("hub:", "runs" if any(one.name == "raycollect-hub" for one in threading.enumerate()) else "has ended")
calls = {
    "get": lambda: col.get(refs[0]),
    "list": lambda: col.get([refs]),
    "handle": lambda: col.get(handle),
    "free": lambda: col.free(refs),
    "allreduce": lambda: col.allreduce_refs(refs),
    "named": lambda: col.allreduce_refs(refs, "g"),
    "put": lambda: col.broadcast_refs([refs[0], put]),
    "barrier": lambda: col.barrier("g"),
    "declare": lambda: col.declare_collective_group(workers),
    "destroy": lambda: col.destroy_collective_group("g"),
    "rebuild": lambda: group.rebuild(),
    "publish": lambda: col.publish(refs, name="p"),
    "subscribe": lambda: col.subscribe("p", refs),
}
errors_of(calls)
start()
errors_of({name: calls[name] for name in calls if name not in ("handle", "named", "barrier", "destroy", "rebuild")})
"""


@pytest.mark.full
def test_what_is_left_of_a_ray_that_was_shut_down_starts_none():
    output = run("-c", _STALE)
    assert "hub: has ended" in output, "its thread would let go of what is Ray's while Ray ends"
    told = [line.split() for line in output.splitlines() if line.endswith(("False", "True"))]
    down = {name: error for name, error, is_up in told if is_up == "False"}
    assert down == {
        **dict.fromkeys(("get", "list", "handle", "free", "allreduce", "named", "put"), "TensorLostError"),
        **dict.fromkeys(("publish", "subscribe"), "TensorLostError"),
        **dict.fromkeys(("barrier", "destroy"), "UnknownGroupError"),
        "declare": "ActorGoneError",
        "rebuild": "ActorGoneError",
    }
    assert {name: error for name, error, is_up in told if is_up == "True"} == {
        **dict.fromkeys(("get", "list", "free", "put", "publish", "subscribe"), "TensorLostError"),
        "allreduce": "NotAMemberError",
        "declare": "ActorGoneError",
    }


_OWN = """
import numpy as np, ray
import raycollect as col

class Rollout:
    def update(self):
        target = {"w": np.zeros(4)}
        col.subscribe("own", target).update()
        return target["w"].tolist()

for value in (1.0, 2.0):
    ray.init(address="local", num_cpus=1, include_dashboard=False)
    pub = col.publish({"w": np.full(4, value)}, "own")
    pub.put()
    print(ray.get(ray.remote(Rollout).options(num_cpus=0).remote().update.remote()))
    ray.shutdown()
"""


@pytest.mark.full
def test_a_driver_publishes_its_own_tensors_in_each_ray_that_it_starts():
    assert run("-c", _OWN).splitlines()[-2:] == ["[1.0, 1.0, 1.0, 1.0]", "[2.0, 2.0, 2.0, 2.0]"]
