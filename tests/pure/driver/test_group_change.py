"""Which members `Group.remove` and the like are told."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from raycollect.driver.group_change import removed
from raycollect.errors import InvalidGroupError
from tests.pure.driver.tracked_plans import group


@pytest.mark.parametrize("rank", [1, np.int64(1), np.array(1)], ids=repr)
def test_a_rank_is_whatever_stands_for_a_whole_number(rank: Any) -> None:
    assert removed(group("g", (5, 6)), ["A", "B"], rank) == ["A"]


@pytest.mark.parametrize("rank", [True, 1.0, "1", np.ones(2, int), np.array(1.0), None], ids=repr)
def test_another_value_is_refused(rank: Any) -> None:
    with pytest.raises(InvalidGroupError, match="is neither a rank from 0 to 1 nor the handle of a member"):
        removed(group("g", (5, 6)), ["A", "B"], rank)


@pytest.mark.parametrize(
    ("ranks", "words"),
    [([0, 1], "no member would be left"), ([1, 1], "rank 1 more than once"), ([], "no member is given")],
)
def test_members_that_can_not_all_go_are_refused(ranks: list[int], words: str) -> None:
    with pytest.raises(InvalidGroupError, match=words) as caught:
        removed(group("g", (5, 6)), ["A", "B"], ranks)
    assert words in caught.value.detail.split(";")[0], "and no more than that"
