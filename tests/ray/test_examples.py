"""The documents' examples run as documented."""

from __future__ import annotations

import re

import numpy as np
import pytest

from examples.documents import declarative, groups, point_to_point

pytestmark = pytest.mark.usefixtures("tidy")


@pytest.mark.full
def test_the_documents_two_ways_to_form_a_group():
    for results in (groups.imperative(), groups.declarative()):
        assert len(results) == 2
        for result in results:
            np.testing.assert_array_equal(result, np.full(4, 2, np.float32))


@pytest.mark.full
def test_the_documents_send_arrives_and_its_anti_pattern_is_an_error():
    received, error = point_to_point.main()

    np.testing.assert_array_equal(received, np.full(10, 3, np.float32))
    assert re.search(r"rank 1", error)
    assert "0.5 s" in error


def test_the_documents_declarative_call():
    for buffer in declarative.main():
        np.testing.assert_array_equal(buffer, np.full(10, 2, np.float32))
