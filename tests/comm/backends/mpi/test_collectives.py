"""The cases of every backend, on real MPI: each collective, dtype and shape against a reference computed locally."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from tests.comm.backends import test_collectives as collectives
from tests.comm.backends import test_point_to_point as messages
from tests.comm.backends.mpi.world import MpiWorld

pytestmark = pytest.mark.needs_mpi

WORLDS = (1, pytest.param(2, marks=pytest.mark.matrix), 3, pytest.param(4, marks=pytest.mark.matrix))
ODD_CASES = (
    collectives.unequal_sizes,
    collectives.odd_layouts,
    collectives.scaled_sums,
    collectives.coalesced,
    collectives.objects,
)
MESSAGES = (
    messages.ring_of_neighbours,
    messages.everybody_sends_first,
    messages.tags_out_of_order,
    messages.same_tag_in_order,
    messages.random_traffic,
    messages.messages_flow_beside_a_collective,
    messages.strided_buffers,
)


def one_after_the_other(cases: tuple[Callable[[], Any], ...]) -> None:
    for case in cases:
        case()


@pytest.mark.parametrize("num_ranks", WORLDS)
def test_reductions_match_the_reference(mpi_world: MpiWorld, num_ranks: int) -> None:
    assert min(mpi_world.run(collectives.reduce_everything, num_ranks=num_ranks, timeout_s=100)) > 100


@pytest.mark.parametrize("num_ranks", WORLDS)
def test_copies_arrive_bit_for_bit(mpi_world: MpiWorld, num_ranks: int) -> None:
    assert min(mpi_world.run(collectives.copy_everything, num_ranks=num_ranks)) > 60


@pytest.mark.parametrize("num_ranks", WORLDS)
def test_odd_cases(mpi_world: MpiWorld, num_ranks: int) -> None:
    mpi_world.run(one_after_the_other, ODD_CASES, num_ranks=num_ranks)


@pytest.mark.parametrize("num_ranks", [pytest.param(2, marks=pytest.mark.matrix), 3])
def test_messages_arrive(mpi_world: MpiWorld, num_ranks: int) -> None:
    mpi_world.run(one_after_the_other, MESSAGES, num_ranks=num_ranks)


def test_a_limit_on_waiting_does_not_end_the_receive(mpi_world: MpiWorld) -> None:
    mpi_world.run(messages.wait_with_a_limit)
