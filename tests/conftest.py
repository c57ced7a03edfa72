"""Fixtures shared by the whole suite: worlds of real ranks, a network lab, what a test may need and must not leave."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.bed.needs import check_needs
from tests.bed.world import World
from tests.lab.network import Lab


@pytest.fixture(scope="session")
def world() -> Iterator[World]:
    """Real ranks: `world.run(function, *args, num_ranks=2, backend="gloo")`."""
    ranks = World()
    yield ranks
    ranks.close()


@pytest.fixture
def lab() -> Iterator[Lab]:
    """A network of namespaces: `lab.host(0).popen([...])`. Using it implies `needs_netns`."""
    with Lab() as network:
        yield network


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if "lab" in getattr(item, "fixturenames", ()):
            item.add_marker(pytest.mark.needs_netns)


def pytest_runtest_setup(item: pytest.Item) -> None:
    check_needs(item)
