"""What `raycollect.plan` refuses without a call: operands that do not match."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from raycollect.core.model import TENSOR
from raycollect.driver.dry_run import _Estimated
from raycollect.errors import MismatchError
from raycollect.planner import plan
from tests.pure.planner.explained import allreduce, info, membership


@pytest.mark.parametrize(("sizes", "field"), [((3, 3), ""), ((3, 4), "shape")])
def test_operands_are_judged_as_at_the_agreement(sizes: tuple[int, int], field: str) -> None:
    there = membership([0, 0])
    held: Any = {("x", rank): SimpleNamespace(structure=TENSOR, infos=info(size)) for rank, size in enumerate(sizes)}
    estimated = _Estimated(plan([allreduce(there)], [there]), held)
    if not field:
        estimated.judge()
        return
    with pytest.raises(MismatchError) as caught:
        estimated.judge()
    assert {one.field for one in caught.value.violations} == {field}
