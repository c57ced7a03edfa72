"""The warning before the first step: there if the estimate is above the device, and nothing of the model is changed."""

from __future__ import annotations

import logging
import tomllib

import pytest
import torch
from torch import nn

from tests.bed.world import World
from tests.planner.live_memory import char_gpt
from torsh_distributed import parallelize
from torsh_distributed.errors import TorshError
from torsh_distributed.plan import Plan
from torsh_distributed.planner.memory.device_check import memory_changes, memory_warning

CPU = torch.device("cpu")


def warned(model: nn.Module, optimizer: str = "AdamW", *, num_local: int = 1, batch: int = 16) -> str | None:
    plan = Plan(dp=1, training={"batch_size": batch}).resolve(1)
    return memory_warning(model, plan, optimizer=optimizer, device=CPU, num_local=num_local)


def test_a_model_that_fits_is_left_alone_and_the_random_state_too() -> None:
    model = char_gpt()
    model.eval()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    state = torch.get_rng_state()
    assert warned(model) is None
    assert torch.equal(torch.get_rng_state(), state)
    assert not model.training
    for name, value in model.state_dict().items():
        assert torch.equal(value, before[name])


def test_too_large_a_batch_is_said_with_the_terms_and_what_to_do() -> None:
    found = warned(char_gpt(), batch=10**8)
    assert found is not None
    assert "activations" in found
    assert "torsh plan fit" in found


def test_an_optimizer_that_is_not_known_is_said() -> None:
    found = warned(char_gpt(), "Lion", batch=10**8)
    assert found is not None
    assert "counted with the state of AdamW: torch.optim has no optimizer Lion" in found


def test_a_model_that_cannot_run_without_values_is_not_warned_of() -> None:
    class Branching(nn.Linear):
        def forward(self, values: torch.Tensor) -> torch.Tensor:
            return super().forward(values) if values.sum() > 0 else values

    assert warned(Branching(4, 4), num_local=10**12) is None


def beyond_this_machine() -> list[str]:
    """Runs on every rank: the warning comes before the model gets memory, which here it never does."""
    said: list[str] = []

    class Kept(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            said.append(record.getMessage())

    logging.getLogger("torsh_distributed.train.assemble").addHandler(Kept())
    with torch.device("meta"):
        model = nn.Sequential(*(nn.Linear(2**18, 2**18) for _ in range(4)))
    with pytest.raises(TorshError, match=r"no such|not found|weights|safetensors"):
        parallelize(model, torch.optim.AdamW, Plan(dp=1), weights="/nowhere/at/all")
    return said


@pytest.mark.ranks
def test_parallelize_warns_before_it_takes_memory(world: World) -> None:
    (said,) = world.run(beyond_this_machine, num_ranks=1)
    assert [one for one in said if "the estimated peak of a rank is 4" in one], said


def test_changes_that_lower_the_peak_say_by_how_much_and_are_plans() -> None:
    model = char_gpt()
    plan = Plan(dp=2, training={"batch_size": 64}).resolve(2)
    found = memory_changes(model, plan, optimizer="AdamW", world_size=2, example=None)
    titles = [title.partition(" ")[0] for title, _, _ in found]
    assert {"training.gradient_accumulation", "mesh.shard"} <= set(titles)
    assert len(titles) == len(set(titles)), "of one key the smallest change"
    for _, change, num_bytes in found:
        assert num_bytes > 0
        Plan.from_dict(tomllib.loads(change))


def test_a_model_that_cannot_be_traced_has_no_changes() -> None:
    assert memory_changes(nn.Identity(), Plan().resolve(1), optimizer="AdamW", world_size=1, example=None) == []
