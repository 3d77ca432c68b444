"""The traces of a function are bounded, and the one that was not used for longest goes."""

from __future__ import annotations

from raycollect.traced.forms import Forms


class One:
    used = 0


def test_the_least_recently_used_goes() -> None:
    forms: Forms[One] = Forms(2)
    a, b, c = One(), One(), One()
    assert not forms.add("a", a)
    assert not forms.add("b", b)
    assert forms.find("a") is a
    assert forms.add("c", c)
    assert forms.find("b") is None
    assert (forms.find("a"), forms.find("c")) == (a, c)
    assert forms.info() == (3, 3, 2, 2)


def test_only_the_form_itself_is_dropped() -> None:
    forms: Forms[One] = Forms(2)
    old, new = One(), One()
    forms.add("a", old)
    forms.add("a", new)
    forms.drop("a", old)
    assert forms.find("a") is new
    forms.drop("a", new)
    forms.drop("a", new)
    assert forms.find("a") is None


def test_all_are_given_back_at_the_end() -> None:
    forms: Forms[One] = Forms(2)
    one = One()
    forms.add("a", one)
    assert forms.clear() == [one]
    assert forms.clear() == []
    assert forms.info().currsize == 0
