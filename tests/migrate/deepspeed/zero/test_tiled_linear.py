"""Tiles compute as the whole layer; estimates are sums."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from torsh_distributed.migrate.deepspeed.zero.memory_estimates import (
    estimate_zero2_model_states_mem_needs,
    estimate_zero3_model_states_mem_needs,
    estimate_zero3_model_states_mem_needs_all_live,
    estimated_bytes,
)
from torsh_distributed.migrate.deepspeed.zero.tiled_linear import TiledLinear


def test_tiles_compute_as_the_whole_layer() -> None:
    whole = nn.Linear(7, 5)
    tiled = TiledLinear(7, 5, in_splits=3, out_splits=2, init_linear=whole)
    inputs = torch.randn(2, 4, 7)
    torch.testing.assert_close(tiled(inputs), whole(inputs))
    with pytest.raises(AssertionError, match="in splits"):
        TiledLinear(2, 2, in_splits=3)


def test_estimates_divide_what_is_sharded(capsys: pytest.CaptureFixture[str]) -> None:
    assert estimated_bytes(1000, 100, 4, stage=2) == (2000 + 14000 // 4, 0)
    assert estimated_bytes(1000, 100, 4, stage=3) == (400 + 16000 // 4, 0)
    assert estimated_bytes(1000, 100, 4, stage=3, cpu_offload=True, cpu_offload_params=True) == (400, 16000)
    _, device = estimate_zero2_model_states_mem_needs(1000, 4, 1, cpu_offload=False)
    assert device == 2000 + 14000 // 4
    assert estimate_zero3_model_states_mem_needs(1000, 100, 4, 1, False, False)[1] == 4400
    estimate_zero3_model_states_mem_needs_all_live(nn.Linear(1000, 1000), 4)
    out = capsys.readouterr().out
    assert "1M params, 1M largest layer params" in out
    assert "offload_param=cpu, offload_optimizer=cpu" in out
