"""Results of methods that a collective takes and nobody keeps leave nothing; see `tests/faults/fresh_refs.py`."""

from __future__ import annotations

from typing import Any

import pytest

from tests.faults.fresh_refs import growth_per_ref, of_raycollect
from tests.faults.growth import grown

WARM_REFS, FRESH_REFS = 15_000, 30_000
"""By then all that is remembered, of so many, is full; `python -m tests.faults.fresh_refs` makes 100,000."""

MOST_NBYTES = 100
"""How much private memory may grow for each. A nested ``ray.put`` in each result takes 150 of each of three actors."""


@pytest.mark.full
@pytest.mark.timeout(900)
def test_thousands_of_fresh_refs_leave_nothing(tidy: Any) -> None:
    first, last = of_raycollect((WARM_REFS, FRESH_REFS))
    assert list(grown(first, last)) == []
    grew = growth_per_ref(first, last)
    assert max(grew.values()) < MOST_NBYTES, grew
