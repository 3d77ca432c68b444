"""The selection of cases covers what it says."""

from __future__ import annotations

from itertools import combinations, product
from math import prod

import pytest

from tests.pure.covering import may_meet, pairwise

PARAMETERS = {"a": "wxyz", "b": range(5), "c": (None, True), "d": "pq", "e": range(3)}
RULES = {("a", "b"): lambda a, b: a != "w" or b < 2, ("e", "c"): lambda e, c: e != 1 or c is None}


def pairs_of(case: dict[str, object]) -> set[frozenset[tuple[str, object]]]:
    return {frozenset(pair) for pair in combinations(case.items(), 2)}


def is_whole(case: dict[str, object], rules: dict) -> bool:
    return all(may_meet(rules, a, case[a], b, case[b]) for a, b in combinations(case, 2))


@pytest.mark.parametrize("rules", [{}, RULES])
def test_every_pair_of_any_whole_case_is_in_a_selected_one(rules: dict) -> None:
    every = [dict(zip(PARAMETERS, values, strict=True)) for values in product(*PARAMETERS.values())]
    selected = pairwise(PARAMETERS, rules)
    assert all(is_whole(case, rules) for case in selected)
    wanted = set().union(*(pairs_of(case) for case in every if is_whole(case, rules)))
    assert set().union(*map(pairs_of, selected)) == wanted
    assert len(selected) < 30 < prod(map(len, PARAMETERS.values()))


def test_a_choice_that_leads_nowhere_is_taken_back() -> None:
    """Any two of a, b and d may be 0, but not all three: no c is left then."""
    parameters = {"a": (0, 1), "b": (0, 1), "d": (0, 1), "c": (0, 1, 2)}
    rules = {(name, "c"): lambda value, c, barred=at: value or c != barred for at, name in enumerate("abd")}
    selected = pairwise(parameters, rules)
    assert all(is_whole(case, rules) for case in selected)
    assert {(0, 0), (0, 1), (1, 0), (1, 1)} == {(case["a"], case["d"]) for case in selected}
    assert not any(case["a"] == case["b"] == case["d"] == 0 for case in selected)


def test_two_values_that_no_case_can_have_are_named() -> None:
    rules = {("b", "c"): lambda b, c: b == 1}
    with pytest.raises(ValueError, match="'a': 0, 'b': 0"):
        pairwise({"a": (0, 1), "b": (0, 1), "c": (0,)}, rules)
