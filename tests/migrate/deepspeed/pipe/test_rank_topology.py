"""Ranks as a grid."""

from __future__ import annotations

import pytest

from torsh_distributed.migrate.deepspeed.pipe.rank_topology import (
    PipeDataParallelTopology,
    PipeModelDataParallelTopology,
    ProcessTopology,
)


def test_the_last_axis_changes_fastest() -> None:
    grid = PipeDataParallelTopology(num_pp=2, num_dp=3)
    assert [grid.get_rank(pipe=1, data=data) for data in range(3)] == [3, 4, 5]
    assert grid.get_coord(4) == (1, 1)
    assert grid.get_axis_comm_lists("pipe") == [[0, 3], [1, 4], [2, 5]]
    assert grid.get_axis_comm_lists("data") == [[0, 1, 2], [3, 4, 5]]
    assert grid.filter_match(pipe=0) == grid.get_axis_list("pipe", 0) == [0, 1, 2]
    assert (grid.world_size(), grid.get_dim("data"), grid.get_dim("model")) == (6, 3, 0)


def test_names_of_ranks_leave_out_data_and_pipe() -> None:
    grid = PipeModelDataParallelTopology(num_pp=2, num_mp=2, num_dp=1)
    assert [grid.get_rank_repr(rank) for rank in range(4)] == ["model_00", "model_01", "model_00", "model_01"]


def test_what_is_not_in_the_grid_is_refused() -> None:
    grid = ProcessTopology(["a", "b"], [2, 2])
    with pytest.raises(ValueError, match="does not support slices"):
        grid.get_rank(a=0)
    with pytest.raises(ValueError, match="outside of the topology"):
        grid.get_rank(a=0, b=7)
    with pytest.raises(ValueError, match="not found"):
        grid.get_coord(9)
