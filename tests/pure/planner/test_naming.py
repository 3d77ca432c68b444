"""Layouts by name or pattern: which wins, what the local tensor is called, and what is refused."""

from __future__ import annotations

from fnmatch import fnmatchcase

from hypothesis import assume, given
from hypothesis import strategies as st

from raycollect.planner.layout import fused_layouts, layout
from raycollect.planner.reshard.naming import has_patterns, is_pattern, of_held, of_names, pattern_faults, unmatched

ROWS = layout([4, 2], mesh={"tp": 2}, spec=("tp",))
COLUMNS = layout([4, 2], mesh={"tp": 2}, spec=(None, "tp"))
WHOLE = layout([4, 2], mesh={"dp": 2})

PARTS = st.text("ab.*?[]!-^\\", min_size=1, max_size=6)


@given(PARTS, st.text("ab.*?[]!-^\\", max_size=5))
def test_patterns_match_as_those_of_fnmatch(pattern: str, name: str) -> None:
    assume(is_pattern(pattern))
    found, missing = of_names({pattern: ROWS}, [name])
    assert (name in found) is fnmatchcase(name, pattern)
    assert missing == ([] if name in found else [name])
    assert of_held({pattern: ROWS}, [name]) == (found, missing)


def test_exact_names_come_before_patterns_and_then_the_first_that_matches_counts() -> None:
    layouts = {"*.up": ROWS, "*": COLUMNS, "1.up": WHOLE}
    found, missing = of_names(layouts, ["0.up", "1.up", "norm"])
    assert found == {"0.up": ROWS, "1.up": WHOLE, "norm": COLUMNS}
    assert missing == []
    assert of_held(layouts, ["0.up", "1.up", "norm"]) == (found, [])


def test_exact_names_stay_where_no_name_asks_for_them() -> None:
    assert of_names({"a": ROWS, "*.up": COLUMNS}, []) == ({"a": ROWS}, [])
    assert of_held({"a": ROWS, "*.up": COLUMNS}, []) == ({"a": ROWS}, [])


def test_names_with_brackets_alone_are_exact() -> None:
    assert not has_patterns({"['up']": ROWS})
    assert of_names({"['up']": ROWS}, ["u"]) == ({"['up']": ROWS}, ["u"])


def test_the_local_tensor_of_a_pattern_has_what_its_wildcards_matched() -> None:
    fused = fused_layouts("*.qkv", {f"*.{name}": ROWS for name in "qkv"})
    names = [f"{layer}.{name}" for layer in (0, 1) for name in "qkv"]
    found, missing = of_names(fused, names)
    assert missing == []
    assert [one.key for one in found.values()] == ["0.qkv"] * 3 + ["1.qkv"] * 3
    assert of_held(fused, ["0.qkv", "1.qkv"]) == (found, [])


def test_a_local_tensor_of_an_exact_name_needs_no_pattern() -> None:
    layouts = {**fused_layouts("qkv", {"q": ROWS, "k": ROWS}), "*.up": COLUMNS}
    found, missing = of_held(layouts, ["qkv", "0.up", "norm"])
    assert list(found) == ["q", "k", "0.up"]
    assert missing == ["norm"]


def test_a_local_tensor_with_other_wildcards_is_told() -> None:
    fused = fused_layouts("layers.?.qkv", {"layers.*.q": ROWS, "layers.?.k": ROWS})
    assert [(one.field, one.found) for one in pattern_faults("dst", fused)] == [
        ("dst of 'layers.*.q'", "in 'layers.?.qkv'")
    ]
    assert [one.field for one in pattern_faults("src", fused_layouts("*", {"q": ROWS}))] == ["src of 'q'"]


def test_tensors_without_a_layout_are_listed() -> None:
    told = unmatched("dst", ["norm", "head"], {"*.up": ROWS})
    assert (told.kind, told.found) == ("layout", "without a layout of 'norm', 'head'")
    assert told.expected == "a name or pattern for each of them, beside '*.up'"
    assert unmatched("dst", ["norm"], {}).expected == "a name or pattern for each of them"
