"""Few cases out of very many, such that every pair of values still meets.

The greedy way of AETG (Cohen, Dalal, Fredman, Patton: "The AETG System", 1997), made deterministic: each case starts
from a pair that no case has yet, then each further parameter takes the value that brings the most such pairs.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import combinations, product
from typing import Any

Rules = Mapping[tuple[str, str], Callable[[Any, Any], bool]]
"""Two parameters -> whether two values of them may meet."""

Pair = tuple[tuple[str, int], tuple[str, int]]  # a parameter and the index of its value, twice, in order


def pairwise(parameters: Mapping[str, Sequence[Any]], rules: Rules) -> list[dict[str, Any]]:
    """Gives cases in which every two values that may meet do.

    Raises:
        ValueError: Two values may meet by their rule, but no whole case has both.
    """
    order = {name: i for i, name in enumerate(parameters)}
    missing = dict.fromkeys(_allowed_pairs(parameters, rules))
    cases = []
    while missing:
        seed = dict(next(iter(missing)))
        chosen = _complete(seed, parameters, rules, missing, order)
        if chosen is None:
            raise ValueError(f"no case has both { ({name: parameters[name][at] for name, at in seed.items()}) }")
        for pair in combinations(sorted(chosen.items(), key=lambda item: order[item[0]]), 2):
            missing.pop(pair, None)
        cases.append({name: values[chosen[name]] for name, values in parameters.items()})
    return cases


def _allowed_pairs(parameters: Mapping[str, Sequence[Any]], rules: Rules) -> list[Pair]:
    return [
        ((a, i), (b, j))
        for a, b in combinations(parameters, 2)
        for i, j in product(range(len(parameters[a])), range(len(parameters[b])))
        if may_meet(rules, a, parameters[a][i], b, parameters[b][j])
    ]


def _complete(
    chosen: dict[str, int],
    parameters: Mapping[str, Sequence[Any]],
    rules: Rules,
    missing: Mapping[Pair, None],
    order: Mapping[str, int],
) -> dict[str, int] | None:
    """Chooses the other parameters' values, going back where none is left."""
    open_ = [name for name in parameters if name not in chosen]
    if not open_:
        return chosen
    name = open_[0]

    def gain(at: int) -> int:
        ends = ((other, (name, at), (other, to)) for other, to in chosen.items())
        return sum(((one, two) if order[name] < order[other] else (two, one)) in missing for other, one, two in ends)

    values = parameters[name]
    fitting = [
        at
        for at, value in enumerate(values)
        if all(may_meet(rules, name, value, other, parameters[other][to]) for other, to in chosen.items())
    ]
    turn = len(missing) % len(values)  # where all are as good, not always the first
    for at in sorted(fitting, key=lambda at: (-gain(at), (at - turn) % len(values))):
        done = _complete({**chosen, name: at}, parameters, rules, missing, order)
        if done is not None:
            return done
    return None


def may_meet(rules: Rules, a: str, value_a: Any, b: str, value_b: Any) -> bool:
    """Whether two values may be in one case, whatever the order in which they are named."""
    if (a, b) in rules:
        return rules[a, b](value_a, value_b)
    return (b, a) not in rules or rules[b, a](value_b, value_a)
