"""Tokens that the caller lends: results of members live as long as somebody holds them, whoever that is (P5).

`test_store` shows the same of actors that nobody leases, whose tokens are their own.
"""

from __future__ import annotations

import os
import socket
import weakref

import numpy as np
import pytest
import ray

import raycollect as col
from raycollect.driver.controller import Controller
from raycollect.member import token_lenders
from raycollect.ray_bridge import call_tokens, submitted_calls
from tests.support.actor_pool import reusable
from tests.support.actors import Buffers, Plain
from tests.support.waiting import has_ended, wait_until

pytestmark = pytest.mark.timeout(120)


class Maker(Buffers):
    def make(self, value=1.0, /, *values, scale=1.0, **named):
        return np.array([value, *values, *named.values()]) * scale

    def pair(self):
        return [np.ones(2), np.zeros(3)]

    def number(self):
        return 5

    def fails(self):
        raise ValueError("as it has to")

    def several(self, count):
        yield from (np.full(2, n) for n in range(count))

    @staticmethod
    def static(value):
        return np.full(2, value)

    @col.by_value
    def values(self):
        return np.ones(2)

    @col.by_value
    def lent(self):
        """How many values are kept here, how many of them with a lent token, and for how many connections."""
        from raycollect.member.participant import this_participant

        here = this_participant()
        keys = here._lenders._keys
        return here.store.statistics().held, sum(map(len, keys.values())), len(keys)


MakerActor = reusable(ray.remote(num_cpus=0)(Maker))


@pytest.fixture
def maker(actors):
    """A member whose tokens are there."""
    (made,) = actors(MakerActor, 1)
    col.declare_collective_group([made], group_name="lent")
    assert with_tokens(made)
    assert is_empty(made), "what the first calls have returned"
    return made


def tokens_of(maker):
    return submitted_calls.watch(maker).tokens


def with_tokens(maker):
    """Whether the next calls of methods that return tensors are lent tokens, which come with a task, soon."""
    tokens = tokens_of(maker)
    ray.wait([maker.make.remote(), maker.pair.remote()], num_returns=2)
    assert wait_until(lambda: {"make", "pair"} <= set(tokens._methods))

    def are_there():
        if not tokens._ready:  # else it might order more
            tokens._refill()
        return len(tokens._ready) > 0

    are_there()
    ray.get(maker.lent.remote())
    return wait_until(are_there)


def lent(maker):
    return ray.get(maker.lent.remote())


def is_empty(maker):
    return wait_until(lambda: lent(maker)[:2] == (0, 0))


def test_a_result_lives_as_long_as_somebody_holds_it(maker):
    ref = maker.make.remote(3)
    assert ray.get(ref).token.binary() != ref.binary()
    assert lent(maker) == (1, 1, 1)
    copy = ray.get(ray.put([ref]))[0]
    del ref
    assert col.get(copy).tolist() == [3]
    handle = ray.get(copy)
    del copy
    assert col.get(handle).tolist() == [3], "the handle alone holds it"
    del handle
    assert is_empty(maker)


def test_discarded_results_are_freed(maker):
    for _ in range(3 * call_tokens.BATCH):  # more than there are tokens
        maker.make.remote()
    assert is_empty(maker), lent(maker)


def test_each_method_gets_its_arguments(maker):
    assert col.get(maker.make.remote()).tolist() == [1]
    assert col.get(maker.make.remote(1, 2, scale=2, more=3)).tolist() == [2, 4, 6]
    assert [one.tolist() for one in col.get(maker.pair.remote())] == [[1, 1], [0, 0, 0]]
    assert ray.get(maker.number.remote()) == 5
    assert ray.get(maker.values.remote()).tolist() == [1, 1]
    assert [len(col.get(one)) for one in maker.pair.options(num_returns=2).remote()] == [2, 3]
    assert [col.get(one)[0] for one in maker.several.remote(3)] == [0, 1, 2]
    assert ray.get(maker.static.remote(2)).tolist() == [2, 2]
    with pytest.raises(ValueError, match="as it has to"):
        ray.get(maker.fails.remote())
    with pytest.raises(TypeError, match=r"unexpected|too many"):
        maker.number.remote(1)
    assert wait_until(lambda: lent(maker)[1] == 0), "others are those of the generator, which are kept for a while"


@ray.remote(num_cpus=0)
def wait_and_add(handle, gate):
    ray.get(gate.wait.remote())
    return float(np.asarray(handle).sum())


def test_an_actor_holds_it_longer_than_its_method_runs(maker):
    plain = Plain.options(num_cpus=0).remote()
    ray.get(plain.call.remote(lambda self, handle: setattr(self, "handle", handle), maker.make.remote(2, 3)))
    assert not wait_until(lambda: lent(maker)[1] == 0, 0.3)
    assert ray.get(plain.call.remote(lambda self: float(np.asarray(self.handle).sum()))) == 5
    ray.get(plain.call.remote(lambda self: delattr(self, "handle")))
    assert is_empty(maker)


def test_a_borrower_passes_it_on_and_forgets_it(maker, gate):
    """Ray puts the value of a small result into the call: what is nested in it has to be counted, too."""

    @ray.remote(num_cpus=0)
    def pass_on(refs, gate):
        return [wait_and_add.remote(refs[0], gate)]

    [total] = ray.get(pass_on.remote([maker.make.remote(2, 3)], gate))
    assert not wait_until(lambda: lent(maker)[1] == 0, 0.3)
    ray.get(gate.open.remote())
    assert ray.get(total) == 5
    assert is_empty(maker)


def test_results_outlive_the_lease(maker):
    ref = maker.make.remote(3)
    ray.get(maker.number.remote())
    col.destroy_collective_group("lent")
    assert col.get(ref).tolist() == [3]
    assert lent(maker) == (1, 1, 1)
    col.declare_collective_group([maker], group_name="again")
    assert with_tokens(maker)
    other = maker.make.remote(4)
    assert wait_until(lambda: lent(maker) == (2, 2, 2)), "what the first calls have returned is gone"
    del ref
    assert wait_until(lambda: lent(maker) == (1, 1, 1)), "the first connection has ended"
    col.allreduce_refs([other], "again")
    del other
    assert is_empty(maker)


def test_results_do_not_keep_their_actor(tidy):
    maker = MakerActor.remote()
    col.declare_collective_group([maker], group_name="lent")
    assert with_tokens(maker)
    pid, ref, known = ray.get(maker.call.remote(lambda self: os.getpid())), maker.make.remote(3), weakref.ref(maker)
    ray.wait([ref])
    col.destroy_collective_group("lent")
    del maker
    assert known() is None
    assert wait_until(lambda: has_ended(pid))


def drive(self, maker):
    """What an actor does that drives others."""
    col.declare_collective_group([maker], group_name="driven")
    assert with_tokens(maker)
    self.ref = maker.make.remote(3)
    ray.wait([self.ref])


@pytest.mark.parametrize("is_destroyed", [False, True])
def test_results_of_a_driver_that_dies_are_freed(tidy, is_destroyed):
    maker, driver = MakerActor.remote(), Plain.options(num_cpus=0).remote()
    ray.get(driver.call.remote(drive, maker))
    if is_destroyed:
        ray.get(driver.call.remote(lambda self: col.destroy_collective_group("driven")))
    assert wait_until(lambda: lent(maker) == (1, 1, 1))  # the driver tells of the results that it has dropped
    ray.kill(driver)
    assert wait_until(lambda: lent(maker) == (0, 0, 0))


@pytest.mark.parametrize("is_destroyed", [False, True])
def test_a_connection_that_is_cut_frees_nothing(maker, is_destroyed):
    ref, other = maker.make.remote(3), maker.make.remote(4)
    assert lent(maker) == (2, 2, 1)
    peer = Controller.current().participants._peers[maker._actor_id.hex()]
    if is_destroyed:
        col.destroy_collective_group("lent")
    peer.link._sock.shutdown(socket.SHUT_RDWR)
    del other
    assert wait_until(lambda: lent(maker)[0] == 1), "it is told by another connection"
    assert not wait_until(lambda: lent(maker)[0] == 0, 1.5 * token_lenders.LOOK_S)
    assert col.get(ref).tolist() == [3]
    del ref
    assert wait_until(lambda: lent(maker) == (0, 0, 0))


def test_calls_while_the_actor_is_busy_do_without(maker, gate):
    """The next tokens are made by a task behind the method; its calls have the actor's own meanwhile."""
    held = maker.call.remote(lambda self, gate: ray.get(gate.wait.remote()), gate)
    refs = [maker.make.remote(n) for n in range(2 * call_tokens.BATCH)]
    ray.get(gate.open.remote())
    ray.get(held)
    assert [col.get(ref)[0] for ref in refs] == list(range(len(refs)))
    count, with_lent, _ = lent(maker)
    assert count == len(refs)
    assert 0 < with_lent <= call_tokens.BATCH
    del refs
    assert is_empty(maker)
