"""Capacity over all ranks, against a queue of tokens served one after another."""

from __future__ import annotations

import itertools

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.parallel.expert.dense_experts import admitted
from torsh_distributed.parallel.expert.routing.admission import admit, capacity_of, count_choices, settle
from torsh_distributed.plan.sections.expert import ExpertConfig


@st.composite
def batches(draw: st.DrawFn) -> tuple[list[list[list[int]]], int]:
    """Choices by rank, token and choice, with the number of experts; ranks may have no token."""
    num_experts = draw(st.integers(1, 6))
    num_choices = draw(st.integers(1, min(3, num_experts)))
    token = st.permutations(range(num_experts)).map(lambda order: order[:num_choices])
    return draw(st.lists(st.lists(token, max_size=12), min_size=1, max_size=4)), num_experts


@settings(max_examples=150)
@given(batch=batches(), capacity=st.integers(0, 8), reroute=st.booleans())
def test_every_choice_ends_where_one_process_would_put_it(
    batch: tuple[list[list[list[int]]], int], capacity: int, reroute: bool
) -> None:
    by_rank, num_experts = batch
    num_choices = next((len(tokens[0]) for tokens in by_rank if tokens), 1)
    choices = [torch.tensor(tokens, dtype=torch.int64).view(-1, num_choices).t() for tokens in by_rank]
    counts = torch.stack([count_choices(experts, num_experts) for experts in choices])
    admission = admit(counts, capacity, reroute=reroute)
    expected = iter(
        admitted(list(itertools.chain(*by_rank)), num_experts=num_experts, capacity=capacity, reroute=reroute)
    )
    for rank, experts in enumerate(choices):
        settled, is_rerouted = settle(experts, admission, rank=rank, num_experts=num_experts)
        for token in range(experts.shape[1]):
            for choice, (expert, factor) in enumerate(next(expected)):
                assert settled[choice, token] == (num_experts if expert < 0 else expert)
                assert bool(is_rerouted[choice, token]) == (factor == 0.5)
        sent = torch.bincount(settled.flatten(), minlength=num_experts + 1)
        assert sent[:num_experts].tolist() == admission.sends[rank].tolist(), "others would expect other rows"
        num_dropped = int((settled == num_experts).sum())
        assert int(admission.sends[rank].sum()) + num_dropped == experts.numel(), "a token is unaccounted for"


def test_capacity_is_the_share_of_an_expert_times_the_factor() -> None:
    config = ExpertConfig(num_experts=8, num_experts_per_token=2, capacity_factor=1.25)
    assert capacity_of(100, config) == 32  # ceil(100 · 2 / 8 · 1.25)
    assert capacity_of(100, config.replace(overflow="none")) is None
    assert capacity_of(0, config) == 0


def test_without_a_limit_all_are_admitted() -> None:
    counts = torch.tensor([[[3, 0], [1, 2]], [[0, 5], [4, 4]]])
    admission = admit(counts, None, reroute=False)
    assert admission.sends.tolist() == [[4, 2], [4, 9]]
    experts = torch.tensor([[0, 0, 0], [1, 1, 0]])
    settled, is_rerouted = settle(experts, admission, rank=0, num_experts=2)
    assert torch.equal(settled, experts)
    assert not is_rerouted.any()
