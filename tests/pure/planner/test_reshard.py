"""Plans of reshards: who owns what, what is refused, and that no wrong plan passes the proof."""

from __future__ import annotations

import gc
from collections.abc import Iterator, Mapping
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from raycollect.core.model import GroupSpec
from raycollect.errors import InternalError, LayoutError, ProtocolError, RefusedError, UnsupportedError
from raycollect.planner import Reshard, lower_reshard, plan
from raycollect.planner.boxes import volume
from raycollect.planner.explain import explain
from raycollect.planner.layout import Layout, Region, layout
from raycollect.planner.reshard import rounds
from raycollect.planner.reshard.halves import Copy, Half, LocalBoxes, decode_half, encode_halves
from raycollect.planner.reshard.proof import problem_of
from raycollect.planner.reshard.request import made_of
from raycollect.planner.reshard.rounds import halves_of
from raycollect.planner.reshard.routes import routes
from raycollect.planner.sizes import moved_by
from tests.pure.resharding import bound, membership_of, request_of, scenes
from tests.support.values import replace

ROWS = layout([8, 6], mesh={"tp": 2}, spec=("tp",))
COLUMNS = layout([8, 6], mesh={"tp": 3}, spec=(None, "tp"))
WHOLE = layout([8, 6], mesh={"dp": 3})


def halves(reshard: Reshard, hosts: Any = None) -> dict[int, Half]:
    return halves_of(reshard, routes(reshard, hosts or (0,) * (max(reshard.ranks) + 1)))


def moved(reshard: Reshard, hosts: Any) -> Any:
    return moved_by(reshard, halves(reshard, hosts), hosts)


# ---------------------------------------------------------------------------------------------- the proof


@given(scenes(), st.integers(1, 3))
@settings(max_examples=100)
def test_plans_are_proven_and_move_the_least_between_hosts(scene: Any, count: int) -> None:
    reshard = bound(*scene)
    hosts = [rank % count for rank in range(max(reshard.ranks) + 1)]
    found = halves(reshard, hosts)
    assert problem_of(reshard, found) == ""
    told = moved_by(reshard, found, hosts)
    if told.least_between >= 0:
        assert told.nbytes_between == told.least_between
    packed = encode_halves(found)
    assert {rank: decode_half(data) for rank, data in packed.items()} == found


def mutants(found: Mapping[int, Half]) -> Iterator[tuple[str, dict[int, Half]]]:
    """Each transfer and copy dropped, doubled or shifted: at one end, at the other, and at both."""
    for rank, half in found.items():
        for at, copy in enumerate(half.copies):
            rest = half.copies[:at] + half.copies[at + 1 :]
            src, dst = copy
            shifted = [Copy(_on(src), dst), Copy(src, _on(dst)), Copy(_on(src), _on(dst))]
            yield "copy dropped", {**found, rank: replace(half, copies=rest)}
            yield "copy doubled", {**found, rank: replace(half, copies=(*half.copies, copy))}
            for one in shifted if src.size else ():
                yield "copy shifted", {**found, rank: replace(half, copies=(*rest, one))}
        for number, one in enumerate(half.rounds):
            for at in range(len(one.takes)):
                yield from _wrong_transfers(found, rank, number, at)


def _wrong_transfers(
    found: Mapping[int, Half], rank: int, number: int, at: int
) -> Iterator[tuple[str, dict[int, Half]]]:
    givers = found[rank].rounds[number].givers
    nth = [sum(peer in some for some in givers[:at]) for peer in givers[at]]
    ends = {}
    for peer, n in zip(givers[at], nth, strict=True):
        takers = found[peer].rounds[number].takers
        ends[peer] = [place for place, one in enumerate(takers) if one == rank][n]
    for change in ("dropped", "doubled", *(["shifted"] if found[rank].rounds[number].takes[at].size else [])):
        taken = _changed(found, rank, number, "takes", at, change)
        given = dict(found)
        for peer, place in ends.items():
            given = _changed(given, peer, number, "gives", place, change)
        yield f"take {change}", taken
        yield f"give {change}", given
        both = dict(taken)
        for peer, place in ends.items():
            both = _changed(both, peer, number, "gives", place, change)
        yield f"transfer {change}", both


def _changed(found: Mapping[int, Half], rank: int, number: int, side: str, at: int, change: str) -> dict[int, Half]:
    half, peers = found[rank], {"takes": "givers", "gives": "takers"}[side]
    one = half.rounds[number]
    boxes, others = list(getattr(one, side)), list(getattr(one, peers))
    shifted = _on(boxes[at]) if boxes[at].size else boxes[at]
    boxes[at : at + 1] = {"dropped": [], "doubled": [boxes[at]] * 2, "shifted": [shifted]}[change]
    others[at : at + 1] = [others[at]] * {"dropped": 0, "doubled": 2, "shifted": 1}[change]
    whole = list(half.rounds)
    whole[number] = one._replace(**{side: tuple(boxes), peers: tuple(others)})
    return {**found, rank: replace(half, rounds=tuple(whole))}


def _on(boxes: LocalBoxes) -> LocalBoxes:
    return boxes._replace(at=(boxes.at[0] + 1, *boxes.at[1:]))


@given(scenes(3), st.integers(1, 2))
@settings(max_examples=40)
def test_any_box_dropped_doubled_or_shifted_is_refused(scene: Any, count: int) -> None:
    reshard = bound(*scene)
    found = halves(reshard, [rank % count for rank in range(max(reshard.ranks) + 1)])
    for what, wrong in mutants(found):
        assert problem_of(reshard, wrong), what


def test_tensors_travel_in_the_narrower_dtype_and_addends_as_they_are() -> None:
    wide, narrow, sums = ROWS, ROWS.astype("float16"), layout([8, 6], mesh={"dp": 2}, partial="dp")
    src, dst = {"a": wide, "b": narrow, "c": sums}, {"a": narrow, "b": wide.astype("float32"), "c": narrow}
    reshard = bound(src, dst, (0, 1), (2, 3))
    assert dict(zip(reshard.names, reshard.dtypes, strict=True)) == {"a": "float16", "b": "float16", "c": "float32"}
    found = halves(reshard)
    assert problem_of(reshard, found) == ""
    told = moved(reshard, (0,) * 4)
    assert sum(nbytes for _, sends in told.sends for _, nbytes in sends) == 2 * 48 + 2 * 48 + 2 * 4 * 48
    wrong = {**found, 2: replace(found[2], dtypes=("bfloat16", *found[2].dtypes[1:]))}
    assert "reads messages as ('bfloat16'" in problem_of(reshard, wrong)
    assert "reads messages" in problem_of(reshard, {**found, 0: replace(found[0], itemsizes=(4, 2, 4))})


def test_a_wrong_plan_is_never_sent(monkeypatch: pytest.MonkeyPatch) -> None:
    def lossy(reshard: Reshard, found: Any) -> dict[int, Half]:
        return next(wrong for what, wrong in mutants(halves_of(reshard, found)) if what == "transfer dropped")

    monkeypatch.setattr(lower_reshard, "halves_of", lossy)
    membership = membership_of(5)
    with pytest.raises(InternalError, match="does not write"):
        plan([request_of(bound({"": ROWS}, {"": COLUMNS}, (0, 1), (2, 3, 4)), membership.spec)], [membership])


class WatchedHosts(tuple[int, ...]):
    """Hosts of ranks that note whether garbage is collected whenever the planner asks for one."""

    seen: set[bool]

    def __getitem__(self, at: Any) -> Any:
        self.seen.add(gc.isenabled())
        return super().__getitem__(at)


def test_the_garbage_of_other_threads_is_collected_meanwhile() -> None:
    hosts = WatchedHosts((0, 1, 0, 1, 0))
    hosts.seen = set()
    reshard = bound({"a": ROWS}, {"a": COLUMNS}, (0, 1), (2, 3, 4))
    membership = membership_of(5)
    membership = replace(membership, topology=replace(membership.topology, hosts=hosts))
    lower_reshard.resharded(request_of(reshard, membership.spec), reshard, membership)
    assert hosts.seen == {True}


def test_columns_of_different_lengths_are_refused() -> None:
    reshard = bound({"": ROWS}, {"": COLUMNS}, (0, 1), (2, 3, 4))
    found = halves(reshard)
    (one,) = found[2].rounds
    wrong = {**found, 2: replace(found[2], rounds=(one._replace(givers=one.givers[:-1]),))}
    assert "columns of different lengths on rank 2" in problem_of(reshard, wrong)


@pytest.mark.parametrize("src", [layout([4], mesh={"tp": 1}), layout([4], mesh={"dp": 2}, partial="dp")])
@pytest.mark.parametrize("hosts", [(0, 0, 0, 0), (0, 0, 1, 1)])
@pytest.mark.parametrize("dst_ranks", [(2, 3), (0, 2)])
def test_a_rank_that_needs_a_box_at_two_places_gets_both(src: Layout, hosts: Any, dst_ranks: Any) -> None:
    rows = [Region(rank=rank, box=((0, 4),), at=(at,)) for rank in range(2) for at in (0, 4)]
    reshard = bound({"": src}, {"": Layout.of_regions([4], rows)}, range(src.world_size), dst_ranks)
    found = halves(reshard, hosts)
    assert problem_of(reshard, found) == ""
    for rank in dst_ranks:
        taken = [boxes for one in found[rank].rounds for boxes in one.takes] + [one.dst for one in found[rank].copies]
        assert {at for boxes in taken for at in range(boxes.at[0], boxes.at[0] + boxes.size[0])} == set(range(8))
    for what, wrong in mutants(found):
        assert problem_of(reshard, wrong), what


def test_addends_in_another_order_are_refused() -> None:
    src, dst = layout([4], mesh={"dp": 2}, partial="dp"), layout([4], mesh={"tp": 1})
    reshard = bound({"": src}, {"": dst}, (0, 1), (2,))
    found = halves(reshard)
    (one,) = found[2].rounds
    swapped = one._replace(givers=((1, 0),))
    assert "adds up addends [1, 0]" in problem_of(reshard, {**found, 2: replace(found[2], rounds=(swapped,))})


# ---------------------------------------------------------------------------------------------- owners


def test_what_a_rank_holds_it_copies_and_sends_nothing() -> None:
    told = moved(bound({"": ROWS}, {"": layout([8, 6], mesh={"tp": 2}, spec=("tp",))}, (0, 1), (0, 1)), (0, 0))
    assert not any(sends for _, sends in told.sends)
    assert told.copies == (96, 96)


def test_replicas_share_the_sending() -> None:
    src, dst = layout([8, 6], mesh={"dp": 4}), layout([8, 6], mesh={"dp": 4})
    told = moved(bound({"": src}, {"": dst}, range(4), range(4, 8)), (0,) * 8)
    assert [(rank, taker) for rank, sends in told.sends for taker, _ in sends] == [(0, 4), (1, 5), (2, 6), (3, 7)]


def test_the_own_host_comes_before_the_network() -> None:
    src, dst = layout([8, 6], mesh={"dp": 2}), layout([8, 6], mesh={"dp": 4})
    told = moved(bound({"": src}, {"": dst}, (0, 3), (1, 2, 4, 5)), (0, 0, 0, 1, 1, 1))
    assert told.nbytes_between == 0
    assert {rank for rank, sends in told.sends for taker, _ in sends if taker in (4, 5)} == {3}


def test_each_byte_enters_a_host_once_and_goes_on_from_there() -> None:
    dst = layout([8, 6], mesh={"dp": 6})
    told = moved(bound({"": ROWS}, {"": dst}, (0, 1), range(2, 8)), (0, 0, 1, 1, 1, 2, 2, 2))
    assert told.nbytes_between == told.least_between == 2 * 8 * 6 * 4
    assert told.rounds == 2


def test_a_sum_is_spread_over_its_readers() -> None:
    src, dst = layout([8], mesh={"dp": 4}, partial="dp"), layout([8], mesh={"dp": 4})
    told = moved(bound({"": src}, {"": dst}, range(4), range(4)), (0,) * 4)
    assert [sum(nbytes for _, nbytes in sends) for _, sends in told.sends] == [
        2 * 3 * 8
    ] * 4  # as a ring would: (w - 1) / w twice


def test_rounds_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rounds, "PIECE_NBYTES", 16)
    monkeypatch.setattr(rounds, "ROUND_NBYTES", 64)
    names = [str(at) for at in range(5)]
    reshard = bound(dict.fromkeys(names, ROWS), dict.fromkeys(names, COLUMNS), (0, 1), (2, 3, 4))
    found = halves(reshard)
    assert problem_of(reshard, found) == ""
    for half in found.values():
        for number in range(len(half.rounds)):
            there, here = half.messages(number)
            assert sum(there.values()) <= 64 >= sum(here.values())
    assert max(half.staging_nbytes for half in found.values()) <= 64 + 3 * 15


def test_equal_forms_are_planned_once() -> None:
    names = [str(at) for at in range(50)]
    found = halves(bound(dict.fromkeys(names, ROWS), dict.fromkeys(names, COLUMNS), (0, 1), (2, 3, 4)))
    assert [len(half.rounds[0].gives) for half in found.values()] == [3, 3, 0, 0, 0]


# ---------------------------------------------------------------------------------------------- refusals


def refused(src: Mapping[str, Layout], dst: Mapping[str, Layout], *ranks: Any) -> list[tuple[str, str, str]]:
    src_ranks, dst_ranks = ranks or ((0, 1), (2, 3, 4))
    membership = membership_of(5)
    with pytest.raises(LayoutError) as caught:
        plan([request_of(bound(src, dst, src_ranks, dst_ranks), membership.spec)], [membership])
    assert caught.value.op == "reshard"
    return [(one.field, one.found, one.expected) for one in caught.value.violations]


def test_all_holes_are_told_in_one_error() -> None:
    rows = [Region(rank=rank, box=((2 * rank, 2 * rank + 1), (0, 6)), at=(0, 0)) for rank in range(2)]
    told = refused({"a": Layout.of_regions([8, 6], rows), "b": ROWS}, {"a": WHOLE, "b": COLUMNS})
    assert told == [
        ("src of 'a'", "without [1:2, 0:6]", "it on some rank, because ranks 0, 1, 2 of dst need it"),
        ("src of 'a'", "without [3:8, 0:6]", "it on some rank, because ranks 0, 1, 2 of dst need it"),
    ]


def test_a_missing_addend_is_told() -> None:
    rows = [Region(rank=rank, box=((0, 8), (0, 6)), at=(0, 0), part=2 * rank) for rank in range(2)]
    ((field, found, _),) = refused({"": Layout.of_regions([8, 6], rows)}, {"": WHOLE})
    assert (field, found) == ("src", "without addend 2 of 3 of [0:8, 0:6]")


def test_overlaps_in_a_target_are_told() -> None:
    rows = [Region(rank=0, box=((lo, lo + 4), (0, 6)), at=(lo // 2, 0)) for lo in (0, 4)]
    ((field, found, _),) = refused({"w": ROWS}, {"w": Layout.of_regions([8, 6], rows)}, (0, 1), (2,))
    assert field == "dst of 'w'"
    assert found.startswith("written twice on rank 0 of dst: [0:4, 0:6] of 'w' and [4:8, 0:6] of 'w' overlap")


def test_all_differences_are_told_in_one_error() -> None:
    asked = layout([8, 6], mesh={"tp": 3}, dtype="int32")
    half = layout([8, 6], mesh={"dp": 2}, partial="dp", dtype="float16")
    src = {
        "a": ROWS,
        "b": ROWS.astype("bfloat16"),
        "c": ROWS,
        "d": layout([8, 6], mesh={"tp": 4}),
        "f": ROWS,
        "g": half,
    }
    dst = {
        "a": layout([8, 7], mesh={"tp": 3}),
        "b": layout([8, 6], mesh={"tp": 3}),
        "c": layout([8, 6], mesh={"dp": 3}, partial="dp"),
        "e": WHOLE,
        "f": asked,
        "g": asked.astype("bfloat16"),
    }
    assert [(field, found) for field, found, _ in refused(src, dst)] == [
        ("number of ranks src of 'd'", "4"),
        ("dst of 'c'", "a partial sum"),
        ("dst of 'a'", "float32[8, 7]"),
        ("dst of 'b'", "float32[8, 6]"),
        ("dst", "of 'e', which src does not have"),
        ("dst of 'f'", "int32, made of float32 of src"),
        ("dst of 'g'", "bfloat16, made of float16 of src"),
    ]


def test_a_side_without_layouts_is_told() -> None:
    assert [field for field, _, _ in refused({"": ROWS}, {})] == ["dst"]


def test_gpu_groups_and_backends_without_alltoall_are_refused() -> None:
    membership = membership_of(5)
    spec = GroupSpec(name="g", group_id="id", backend="nccl", world_size=5, memory="cuda", ops=("allreduce",))
    with pytest.raises(UnsupportedError, match="works on GPUs") as caught:
        plan([request_of(bound({"": ROWS}, {"": COLUMNS}, (0, 1), (2, 3, 4)), spec)], [replace(membership, spec=spec)])
    assert len(caught.value.violations) == 2


def test_operands_of_other_ranks_are_refused() -> None:
    membership = membership_of(5)
    asked = request_of(bound({"": ROWS}, {"": COLUMNS}, (0, 1), (2, 3, 4)), membership.spec)
    with pytest.raises(RefusedError, match="one per rank of either side"):
        plan([replace(asked, operands=asked.operands[1:])], [membership])


@pytest.mark.parametrize("data", [b"", b"\xc1", b"\x93\x01\x02\x03"])
def test_malformed_halves_are_refused(data: bytes) -> None:
    with pytest.raises(ProtocolError, match="malformed half"):
        decode_half(data)


# ---------------------------------------------------------------------------------------------- explained


def test_an_explanation_tells_bytes_beside_the_least_rounds_staging_and_owners() -> None:
    membership = membership_of(5, (0, 0, 1, 1, 1))
    reshard = bound({"": ROWS}, {"": COLUMNS}, (0, 1), (2, 3, 4))
    found = plan([request_of(reshard, membership.spec, made=True)], [membership])
    held = {2 * rank: made_of(decode_half(found.parts[0].template(rank).boxes).src)[1] for rank in (0, 1)}
    told = explain(found, held)
    (row,) = told.rows
    assert row.moved is not None
    assert row.nbytes_between == row.moved.least_between == volume(((0, 0), (8, 6))) * 4
    assert row.made_nbytes == 8 * 2 * 4
    assert (told.memory.packing, row.moved.rounds, row.moved.boxes) == (96, 1, 6)
    assert row.moved.sends[0] == (0, ((2, 32), (3, 32), (4, 32)))
