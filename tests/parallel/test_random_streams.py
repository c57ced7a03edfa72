"""Random numbers of a split model: common ones for whole activations, a rank's own for pieces, both repeatable."""

from __future__ import annotations

import torch
from torch import nn

from torsh_distributed.parallel.random_streams import begin_local_stream, draws_numbers, end_local_stream

CPU = torch.device("cpu")


def block(rank: int) -> list[float]:
    """One number drawn for pieces, twice, with one for whole activations after each."""
    drawn = []
    for _ in range(2):
        begin_local_stream(CPU, rank)
        begin_local_stream(CPU, rank)  # as the second of two layers does
        drawn.append(torch.rand(1).item())
        end_local_stream()
        end_local_stream()
        drawn.append(torch.rand(1).item())
    return drawn


def test_ranks_draw_different_numbers_for_pieces_and_equal_ones_for_the_rest() -> None:
    torch.manual_seed(3)
    first = block(rank=0)
    torch.manual_seed(3)
    second = block(rank=1)
    assert first[1::2] == second[1::2]
    assert len({*first, *second}) == 6


def test_a_restored_state_repeats_them() -> None:
    torch.manual_seed(3)
    state = torch.get_rng_state()
    first = block(rank=1)
    torch.set_rng_state(state)
    assert block(rank=1) == first


def test_dropout_is_seen_in_modules_and_in_their_numbers() -> None:
    plain = nn.Linear(2, 2)
    assert not draws_numbers(nn.Sequential(plain, nn.Dropout(0.0)))
    assert draws_numbers(nn.Sequential(plain, nn.Dropout(0.1)))
    plain.attention_dropout = 0.1
    assert draws_numbers(plain)
