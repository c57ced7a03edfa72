"""Which schedule an engine steps, and the helpers that scripts borrow."""

from __future__ import annotations

import pytest
import torch
from torch.optim.lr_scheduler import LambdaLR

from torsh_distributed.migrate.deepspeed.config.translators.batch_keys import BatchTriangle
from torsh_distributed.migrate.deepspeed.schedules.script_schedule import choose_scheduler
from torsh_distributed.migrate.deepspeed.surface.runtime_helpers import (
    get_grad_norm,
    get_weight_norm,
    required_torch_version,
)
from torsh_distributed.migrate.deepspeed.training.run_settings import RunSettings

SETTINGS = RunSettings({}, BatchTriangle(train=1, micro=1, accumulation=1), 1)


def test_a_scheduler_of_another_optimizer_is_refused() -> None:
    params = [torch.nn.Parameter(torch.ones(2))]
    mine, other = torch.optim.SGD(params, lr=0.1), torch.optim.SGD(params, lr=0.1)
    schedule = LambdaLR(mine, lambda epoch: 0.5**epoch)
    assert choose_scheduler(SETTINGS, schedule, mine, mine) is schedule
    made = choose_scheduler(SETTINGS, lambda optimizer: LambdaLR(optimizer, lambda epoch: 1.0), other, other)
    assert made.optimizer is other
    with pytest.raises(AssertionError, match="Client LR Scheduler is instantiated"):
        choose_scheduler(SETTINGS, schedule, other, other)  # its rates would reach nothing that trains


def test_helpers_that_scripts_borrow_measure() -> None:
    param = torch.nn.Parameter(torch.tensor([3.0, 4.0]))
    assert get_weight_norm([param]) == 5.0
    assert get_grad_norm(param) == 0.0
    param.grad = torch.tensor([float("inf"), 0.0])
    assert get_grad_norm([param]) == -1.0
    assert required_torch_version(min_version=1.8)
    assert not required_torch_version(min_version="99.1")
    assert not required_torch_version(max_version=1.13)
