"""What a user passes through to a backend becomes plain values, or is refused by name."""

from __future__ import annotations

import pytest

from raycollect.backends import local
from raycollect.backends.shm import communicator as shm
from raycollect.core.model import GroupSpec
from raycollect.core.protocols import Joining
from raycollect.errors import InvalidGroupError
from raycollect.group import pg_options
from tests.pure.communicators import MemoryExchange, MemoryRendezvous, MemoryStar


class Vendor:
    """Options as a vendor's package has them."""

    def __init__(self):
        self.chip_map = [1, 0]
        self._timeout = object()

    @property
    def backend(self):
        return "computed"

    def merge(self):
        """No option."""


def test_an_object_gives_the_attributes_that_can_be_set():
    assert pg_options.read(Vendor()) == ((("chip_map", (1, 0)),), ())


@pytest.mark.parametrize(
    ("given", "where"),
    [
        ({"a": object()}, ["pg_options.a"]),
        ({"a": [1, {"b": b"raw"}], "c": 1j}, ["pg_options.a[1].b", "pg_options.c"]),
        ({"a": {1: 2}}, ["pg_options.a"]),
        ({1: 2}, ["pg_options"]),
        ({"a": {2, 3}}, ["pg_options.a"]),
        (3.5, ["pg_options"]),
        (object(), ["pg_options"]),
    ],
)
def test_anything_else_is_refused_by_name(given, where):
    pairs, problems = pg_options.read(given)
    assert pairs == ()
    assert [problem.split(" is ", 1)[0] for problem in problems] == where


@pytest.mark.parametrize("backend", ["local", "shm"])
def test_a_backend_that_ignores_the_options_of_others_refuses_those_that_nobody_has(backend):
    create = {"local": local, "shm": shm}[backend].create
    known = {"deterministic": "rank_order", "device": 0}

    def join(options, name=backend):
        given, _ = pg_options.read(options)
        spec = GroupSpec(name="g", group_id="1", backend=name, world_size=1, options=given)
        return create(Joining(spec, 0, MemoryRendezvous(), MemoryExchange(MemoryStar(), 0)))

    join(known).close()
    join({"x": 1}, "of-another-package").close()
    with pytest.raises(
        InvalidGroupError, match=f"backend '{backend}': there is no option 'determinstic', 'x'; .*'deterministic'"
    ):
        join({**known, "x": 1, "determinstic": True})
