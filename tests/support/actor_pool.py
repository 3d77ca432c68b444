"""Actors that outlive their test: to start a process with Ray takes a second, to make one as new a tenth."""

from __future__ import annotations

import os
import sys
import threading
import types
from collections.abc import Mapping
from traceback import walk_stack
from typing import Any

import ray

from tests.support.waiting import wait_until

REUSABLE: list[Any] = []
"""The classes whose actors go on."""

MOST_IDLE = int(os.environ.get("RAYCOLLECT_TEST_IDLE_ACTORS", "5"))
"""How many actors of a class wait for another test."""

RESET_TIMEOUT_S = 5.0
METHOD_TIMEOUT_S = 0.5
"""How long the methods of a test may go on after it."""

MOST_USES = 60
"""Each leaves a few idle threads behind."""

_MADE_ANEW = (types.MethodType, staticmethod, classmethod)


def reusable(cls: Any) -> Any:
    """Marks an actor class of a module, one that is there all the time and holds nothing outside of itself."""
    REUSABLE.append(cls)
    return cls


def may_be_reused(cls: Any, options: dict[str, Any]) -> bool:
    """Whether an actor of a class that was started with options can go on in another test."""
    return cls in REUSABLE and options.keys() <= {"max_concurrency"}


def start(cls: Any, count: int, args: tuple[Any, ...], **options: Any) -> list[Any]:
    """Starts actors, each of which notes how its process looks before anything else happens in it."""
    made = [cls.options(num_cpus=0, **options).remote(*args) for _ in range(count)]
    noted = [actor.__ray_call__.remote(_note) for actor in made]
    if options:  # several threads: what is called next may overtake it
        ray.get(noted)
    return made


def reset(actors: list[Any], args: tuple[Any, ...], timeout_s: float = RESET_TIMEOUT_S) -> list[Any]:
    """Makes actors as good as new; returns those with which it went well in time. The others are killed."""
    asked = {actor.__ray_call__.remote(_reset, args, timeout_s / 2): actor for actor in actors}
    done, _ = ray.wait(list(asked), num_returns=len(asked), timeout=timeout_s) if asked else ([], [])
    well = [asked[ref] for ref in done if _is_true(ref)]
    for actor in set(actors) - set(well):
        ray.kill(actor)
    return well


def _is_true(ref: Any) -> bool:
    try:
        return bool(ray.get(ref))
    except ray.exceptions.RayError:
        return False


# ---------------------------------------------------------------------------------------------- in the actor


def _note(actor: Any) -> None:
    from raycollect.pos.segments import Segments

    Segments.current()  # the arena stays
    sys._raycollect_first = (dict(os.environ), _look(), 0)  # type: ignore[attr-defined]


def _reset(actor: Any, args: tuple[Any, ...], timeout_s: float) -> bool:
    """Whether the process, less what is taken back here, is as it was at first: no patch, no variable is left."""
    from raycollect.member import runtime as of_process
    from raycollect.member.participant import Participant

    environment, looked, uses = sys._raycollect_first  # type: ignore[attr-defined]
    if not wait_until(lambda: not _is_busy(), METHOD_TIMEOUT_S):
        return False
    runtime = of_process._process.runtime
    participant = None if runtime is None else runtime._parts.get(Participant)
    if participant is not None:
        if not wait_until(lambda: participant._lease is None, timeout_s):  # its controller's goodbye is on its way
            return False
        for keys in list(participant._lenders._keys.values()):  # of the test before, whose controller is gone
            participant.store.free(list(keys))
        participant.close()
    if runtime is not None:
        process_groups = runtime.process_groups
        for process_group in process_groups.all():  # its members are all in the same test
            process_groups.remove(process_group)
            process_group.close()
        for notice in process_groups.notices.values():
            notice.end()
        process_groups.hub.close()
    of_process._process.runtime = None  # the arena stays: it is empty once nobody uses it
    if dict(os.environ) != environment or not _is_same(looked) or uses == MOST_USES:
        return False
    sys._raycollect_first = (environment, looked, uses + 1)  # type: ignore[attr-defined]
    vars(actor).clear()
    actor.__init__(*args)
    return True


def _is_busy() -> bool:
    """Whether another thread runs a method."""
    me = threading.get_ident()
    frames = [walk_stack(frame) for thread, frame in sys._current_frames().items() if thread != me]
    return any(frame.f_code.co_name == "actor_method_executor" for stack in frames for frame, _ in stack)


def _look() -> list[tuple[Mapping[str, Any], dict[str, Any]]]:
    """What tests change, each with a copy: the modules of raycollect, their tables and their classes."""
    modules = {name: module for name, module in sys.modules.items() if name.split(".")[0] == "raycollect"}
    found = [(sys.modules, modules)]
    for name, module in modules.items():
        spaces = [vars(module)]
        for key, value in vars(module).items():
            if isinstance(value, dict) and key.isupper():  # a table
                spaces.append(value)
            if isinstance(value, type) and value.__module__ == name:
                spaces.append(vars(value))
        found += [(space, dict(space)) for space in spaces]
    return found


def _is_same(looked: list[tuple[Mapping[str, Any], dict[str, Any]]]) -> bool:
    """Whether all that was there is there still: the very same object, but of methods, which are made anew."""
    for space, before in looked:
        for name, value in before.items():
            found = space.get(name)
            if found is not value and not (isinstance(value, _MADE_ANEW) and type(found) is type(value)):
                return False
    return True
