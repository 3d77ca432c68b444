"""One cluster of three hosts for all tests that can have it."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator

import pytest

from tests.hosts.cluster import Cluster
from tests.hosts.namespaces import shaping_objection


@pytest.fixture(scope="session")
def hosts_cluster() -> Iterator[Cluster]:
    """Three hosts with a Ray node each, on links of 1 Gbit/s; skipped, and said why, where there can be none."""
    reason = shaping_objection()
    if reason:
        pytest.skip(reason)
    with Cluster(3) as made:
        yield made


@pytest.fixture
def play(hosts_cluster: Cluster) -> Iterator[Callable[..., str]]:
    """Runs programs of `programs` by name on the cluster; afterwards all links are whole again."""

    def played(*names: str, timeout_s: float = 250.0) -> str:
        printed = hosts_cluster.driver([sys.executable, "-m", "tests.hosts.programs", *names], timeout_s=timeout_s)
        for name in names:
            assert f"{name}: done" in printed, printed
        return printed

    yield played
    hosts_cluster.hosts.heal_all()
