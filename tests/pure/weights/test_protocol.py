"""The protocol of versions, in every order of its steps, with a fault at every one of them (pains 1 and 5)."""

from __future__ import annotations

import pickle
from contextlib import nullcontext
from types import SimpleNamespace

import pytest

from raycollect.errors import InternalError, PushError, VersionNotPutError, VersionTimeoutError
from raycollect.weights import protocol, subscription
from raycollect.weights.protocol import (
    Phase,
    RankFailed,
    RankLost,
    RankSealed,
    RankShown,
    RankState,
    RankVerified,
    Tell,
    Version,
)
from raycollect.weights.publication import Publication
from raycollect.weights.ranks import Job, Update
from raycollect.weights.subscription import Subscription
from raycollect.weights.turns import Turns
from tests.pure.weights.world import ATOMS, DRIVER, RANKS, World, digest, is_whole, restarted, steps
from tests.support.values import replace


class Ranks(list):
    """In place of the ranks of a side."""

    members = property(list)


V1 = Version(1, 1, digests={atom: digest(1) for atom in ATOMS})


def explore(first: World, puts: int, updates: int) -> tuple[list[World], set[str]]:
    """All worlds that can come of one, each checked, and what was done."""
    seen, todo, done = {first.key: first}, [first], set()
    while todo:
        for name, world in steps(todo.pop(), puts, updates):
            done.add(name)
            if world.key not in seen:
                check(world)
                seen[world.key] = world
                todo.append(world)
    return list(seen.values()), done


def check(world: World) -> None:
    for rank, reader in enumerate(world.readers):
        if reader.state.is_dirty:
            assert world.inplace
            assert reader.state.shown is None, "a label where methods may see nothing"
            continue
        assert is_whole(reader.front), f"reader {rank} sees a mixed version {reader.front}"
        for atom, landed in reader.state.landed.items():
            assert digest(reader.back[ATOMS.index(atom)]) == landed, "verified, and something else lies there"
        shown = reader.state.shown
        assert reader.front[0] == (shown.number if shown else 0), "the label is not that of the bytes"
        if shown:
            deciders = [ranks for number, ranks in world.at_show if number == shown.number]
            assert any(rank in ranks for ranks in deciders), "shown, and nobody had decided it"
    for receipt in world.receipts:
        assert receipt.done
        for rank, digests in receipt.done.items():
            assert digests == receipt.version.digests, "a false receipt"
            assert world.readers[rank].state.shown >= receipt.version, "a receipt of what the rank does not show"
            assert rank not in receipt.lost


@pytest.mark.parametrize(("puts", "updates", "faults"), [(1, 1, 1), (2, 1, 0)])
def test_pain_1_and_5_no_order_of_steps_shows_a_mixed_version_or_gives_a_false_receipt(puts, updates, faults):
    worlds, done = explore(World(faults=faults), puts, updates)
    assert any(world.receipts for world in worlds)
    if faults:
        assert {name for name in done if name.endswith(("dies", "forgets"))} >= {
            *(f"{who} {at} dies" for who in ("trainer", "reader") for at in range(2)),
            "the publisher dies",
            "the readers' driver dies",
            "the directory forgets",
        }
        assert any(name.startswith("a byte flips") for name in done)


def test_pain_1_and_5_no_order_of_a_streams_parts_shows_a_mixed_version():
    worlds, done = explore(World(is_streamed=True), 1, 1)
    assert any(world.receipts for world in worlds)
    assert "a part comes to reader 0" in done
    assert {f"a layer of trainer {rank} fails" for rank in range(2)} <= done


def test_pain_1_and_5_in_place_methods_see_a_whole_version_or_are_refused():
    worlds, _ = explore(World(inplace=True), 1, 1)
    assert any(world.receipts for world in worlds)
    assert any(reader.state.is_dirty for world in worlds for reader in world.readers)


def _is_careless(state, version, wanted, present):
    return protocol.stage(state, version, wanted)


def _believes(state, version, digests):
    return replace(state, landed={**state.landed, **{atom: state.wanted[atom] for atom in digests}})


def _keeps_all(state, version, part):  # and says of a new part that it has come
    return replace(state, wanted={**state.wanted, **part}, landed={**state.landed, **part})


def _hurries(state):
    return replace(state, phase=Phase.SHOWING, waiting=frozenset(range(RANKS))), Tell.SHOW


@pytest.mark.parametrize(
    ("wrong", "world"),
    [
        ({"land": _believes}, World()),
        ({"_all_verified": _hurries, "may_show": lambda state, version: True}, World()),
        ({"expect": _keeps_all}, World(is_streamed=True)),
        ({"stage_in_place": _is_careless}, World(inplace=True)),
    ],
)
def test_the_search_finds_what_is_wrong_with_a_protocol(monkeypatch, wrong, world):
    for name, function in wrong.items():
        monkeypatch.setattr(protocol, name, function)
    with pytest.raises(AssertionError, match=r"mixed version|label|false receipt|nobody had|something else lies"):
        explore(world, 1, 1)


@pytest.mark.full
@pytest.mark.timeout(600)
@pytest.mark.parametrize(("puts", "updates", "faults"), [(2, 1, 1), (1, 2, 1), (1, 1, 2)])
def test_pain_1_and_5_longer_runs(puts, updates, faults):
    explore(World(faults=faults), puts, updates)
    explore(World(faults=faults, inplace=True), puts, updates)


def test_pain_2_after_any_fault_readers_that_live_can_have_the_version_while_a_holder_of_each_atom_lives():
    worlds, _ = explore(World(), 1, 1)
    stranded = [world for world in worlds if DRIVER in world.dead and world.posted and not world.orders]
    assert stranded
    for world in {state.key: state for state in map(restarted, stranded)}.values():
        again, _ = explore(world, 1, world.updates + 1)
        assert any(world.receipts for world in again), "nobody can go on"


def test_a_rank_that_has_verified_and_then_dies_costs_the_others_nothing():
    update = protocol.begin_update(V1, 2)
    for event, expected in [
        (RankVerified(0, V1.digests), None),
        (RankLost(0), None),  # nothing is due from it: that it is gone shows when it is told to show
        (RankVerified(1, V1.digests), Tell.SHOW),
        (RankLost(0), None),
        (RankShown(1), None),
    ]:
        update, tell = protocol.advance(update, event)
        assert tell is expected
    assert (update.phase, set(update.done), update.lost) == (Phase.DONE, {1}, {0})


def test_pain_2_whether_some_show_a_version_for_which_others_are_late():
    def after(*events):
        job = Job(round=protocol.begin_update(V1, 3), errors={})
        for event in events:
            job.round, _ = protocol.advance(job.round, event)
        job.end_late()
        ranks = SimpleNamespace(late_error=lambda name, job, timeout_s, *, is_shown: is_shown)
        subscription = SimpleNamespace(name="policy", _ranks=ranks, _check_open=lambda: None)
        return Subscription._failure(subscription, job, 1.0)

    verified = [RankVerified(rank) for rank in range(3)]
    assert not after(*verified[:2])  # they wait for the third
    assert after(*verified)  # they were told to show it, and will
    assert after(*verified, RankShown(1))


@pytest.mark.parametrize("event", [RankLost(1), RankFailed(1)])
def test_a_trainer_that_is_gone_posts_nothing(event):
    put, _ = protocol.begin_put(V1, 2)
    put, _ = protocol.advance(put, RankSealed(0, {ATOMS[0]: digest(1)}))
    put, tell = protocol.advance(put, event)
    assert (put.phase, tell) == (Phase.FAILED, None)
    assert protocol.advance(put, RankSealed(1)) == (put, None)  # it comes late, and changes nothing


def test_pain_2_a_trainer_that_is_gone_is_named_whoever_else_is_waited_for():
    put, _ = protocol.advance(protocol.begin_put(V1, 3)[0], RankLost(2))
    ranks = Ranks([SimpleNamespace(actor=who) for who in "ABC"])
    publication = SimpleNamespace(name="policy", _ranks=ranks)
    with pytest.raises(VersionNotPutError, match="its process has ended") as raised:
        Publication._check(publication, Job(round=put, errors={}), 1.0)
    assert (raised.value.rank, raised.value.actor) == (2, "C")


def test_replicas_that_differ_are_not_published():
    put, _ = protocol.begin_put(V1, 2)
    put, _ = protocol.advance(put, RankSealed(0, {ATOMS[0]: digest(1)}))
    put, tell = protocol.advance(put, RankSealed(1, {ATOMS[0]: digest(2)}))
    assert (put.phase, tell, put.differing) == (Phase.FAILED, None, (ATOMS[0],))


def test_whatever_keeps_a_group_from_a_version_the_others_have_it_and_all_is_told(monkeypatch):
    class Group:
        name, _ranks = "policy", None

        def __init__(self, outcome):
            self.outcome, self._id, self._turns = outcome, str(id(self)), Turns("policy")
            self._directory = SimpleNamespace(within=lambda *_: nullcontext(), holders=lambda version: [])
            self._directory.post_holders = lambda version, holders: None

        def _job(self, version, records, left_s):
            return Update(round=protocol.begin_update(version, 1), errors={}, tell=None, read=None)

        def _finish(self, job, began_s, timeout_s):
            if isinstance(self.outcome, Exception):
                raise self.outcome
            return self.outcome

    monkeypatch.setattr(subscription, "drive", lambda jobs, timeout_s, beside: None)
    other, late = InternalError(detail="a tensor has become another"), VersionTimeoutError(name="policy", missing=(0,))
    with pytest.raises(PushError) as raised:
        subscription.update_all([Group(other), Group("receipt"), Group(late)], V1, 1.0, resolved=V1)
    same = pickle.loads(pickle.dumps(raised.value))
    for error in (raised.value, same):
        assert error.receipts == (None, "receipt", None)
        assert [type(group_error) for group_error in error.errors] == [InternalError, type(None), VersionTimeoutError]
    assert subscription.update_all([Group("receipt")], V1, 1.0, resolved=V1) == ["receipt"]
    with pytest.raises(InternalError):
        subscription.update_all([Group(other)], V1, 1.0, resolved=V1)


def test_a_retry_takes_what_is_missing():
    state = protocol.stage(RankState(), V1, V1.digests)
    state = protocol.land(state, V1, {ATOMS[0]: digest(1), ATOMS[1]: digest(5)})
    assert state.missing == [ATOMS[1]]
    newer = Version(1, 2, digests={ATOMS[0]: digest(1), ATOMS[1]: digest(2)})
    state = protocol.stage(state, newer, newer.digests)
    assert state.missing == [ATOMS[1]]  # the other has not changed
    assert protocol.show(state, newer).shown is None
    assert protocol.land(state, V1, V1.digests) == state  # of another version: it comes late


def test_a_stream_that_begins_again_knows_nothing_of_atoms_that_were_cut_otherwise():
    state = protocol.open_stream(RankState(), V1, ATOMS)
    state = protocol.expect(state, V1, {ATOMS[0]: digest(1)})
    state = protocol.land(state, V1, {ATOMS[0]: digest(1)})
    assert protocol.open_stream(state, V1, ATOMS).landed == {ATOMS[0]: digest(1)}
    state = protocol.open_stream(state, V1, [("a", ((0,), (2,)))])  # what lands of these overwrites the others
    state = protocol.open_stream(state, V1, ATOMS)
    assert protocol.stage(state, V1, V1.digests).missing == list(ATOMS)
    staged = protocol.stage(state, V1, V1.digests)
    assert protocol.open_stream(staged, V1, ATOMS) == staged  # it comes late


def test_versions_are_ordered_by_epoch_then_number():
    assert Version(1, 9) < Version(2, 1) < Version(2, 2)
    assert len(ATOMS) == RANKS
