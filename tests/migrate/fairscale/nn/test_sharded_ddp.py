"""ShardedDataParallel beside OSS trains as one process does on the whole batch, however it is used."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.functional import mse_loss
from torch.optim import SGD, Adam

from tests.bed.world import World
from torsh_distributed.errors import InvalidArgument
from torsh_distributed.migrate.fairscale.nn.sharded_ddp import ShardedDataParallel
from torsh_distributed.migrate.fairscale.optim.oss import OSS, ShardedGradScaler


class Net(nn.Module):
    """Two branches, of which one may be unused."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.idle = nn.Linear(6, 10), nn.Linear(10, 3), nn.Linear(6, 3)

    def forward(self, inputs: Tensor, *, with_idle: bool = False) -> Tensor:
        out: Tensor = self.second(self.first(inputs).tanh())
        return out + self.idle(inputs) if with_idle else out


def net() -> Net:
    torch.manual_seed(0)
    return Net()


def data(step: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(step)
    return torch.randn(8, 6, generator=generator), torch.randn(8, 3, generator=generator)


def alone(num_steps: int, **options: float) -> nn.Module:
    """One process with the whole batch. Parameters without a gradient have one of zeros, as in FairScale."""
    model = net()
    optimizer = Adam(model.parameters(), lr=0.05, weight_decay=0.1)
    for step in range(num_steps):
        optimizer.zero_grad()
        inputs, targets = data(step)
        mse_loss(model(inputs, with_idle=step == 2), targets).backward()
        for param in model.parameters():
            param.grad = torch.zeros_like(param) if param.grad is None else param.grad
        if "clip" in options:
            nn.utils.clip_grad_norm_(model.parameters(), options["clip"])
        optimizer.step()
    return model


def difference(model: nn.Module, other: nn.Module) -> float:
    pairs = zip(model.parameters(), other.parameters(), strict=True)
    return max((one.detach() - two.detach()).abs().max().item() for one, two in pairs)


def own(step: int) -> tuple[Tensor, Tensor]:
    inputs, targets = data(step)
    return inputs.chunk(dist.get_world_size())[dist.get_rank()], targets.chunk(dist.get_world_size())[dist.get_rank()]


def train_in_many_ways() -> dict[str, float]:
    """The largest difference to one process, by way of training."""
    found = {}
    model = net()
    optimizer = OSS(model.parameters(), optim=Adam, lr=0.05, weight_decay=0.1)
    wrapped = ShardedDataParallel(model, optimizer, reduce_buffer_size=40)
    scaler = ShardedGradScaler(init_scale=2.0**10, growth_interval=2)
    for step in range(4):
        optimizer.zero_grad()
        inputs, targets = own(step)
        scaler.scale(mse_loss(wrapped(inputs, with_idle=step == 2), targets)).backward()
        assert all(param.grad is not None for param in (*model.first.parameters(), *model.second.parameters()))
        scaler.unscale_(optimizer)
        optimizer.clip_grad_norm(0.3)
        scaler.step(optimizer)
        scaler.update()
    found["scaled, clipped, in small buckets"] = difference(model, alone(4, clip=0.3))
    assert scaler.get_scale() == 2.0**12

    model = net()
    optimizer = OSS(model.parameters(), optim=Adam, lr=0.05, weight_decay=0.1)
    wrapped = ShardedDataParallel(model, optimizer, reduce_buffer_size=0)
    for step in range(4):
        optimizer.zero_grad()
        inputs, targets = own(step)
        for index, (few, fewer) in enumerate(zip(inputs.chunk(2), targets.chunk(2), strict=True)):
            loss = mse_loss(wrapped(few, with_idle=step == 2), fewer) / 2
            if index == 0 and step % 2:
                with wrapped.no_sync():
                    loss.backward()
            else:
                loss.backward()  # without no_sync gradients are sent twice, and still add up
        held = [param.grad is not None for param in model.parameters()]
        assert held == [optimizer.owner(param) == dist.get_rank() for param in model.parameters()], "others are freed"
        optimizer.step()
    found["accumulated"] = difference(model, alone(4))

    state = optimizer.state_dict(all_ranks=True)
    plain = copy.deepcopy(model)
    single = Adam(plain.parameters(), lr=1.0)
    single.load_state_dict(state)  # a plain optimizer reads it
    twin = copy.deepcopy(model)
    other = OSS(twin.parameters(), optim=Adam, lr=1.0)
    other.load_state_dict(single.state_dict())  # and the other way
    loaded = ShardedDataParallel(twin, other)
    for one, optim, step in ((loaded, other, 9), (wrapped, optimizer, 9)):
        optim.zero_grad()
        inputs, targets = own(step)
        mse_loss(one(inputs), targets).backward()
        optim.step()
    found["loaded"] = difference(model, twin)
    return found


def freeze_and_overflow() -> list[object]:
    model = net()
    optimizer = OSS(model.parameters(), optim=SGD, lr=0.1)
    wrapped = ShardedDataParallel(model, optimizer, warn_on_trainable_params_changed=False)
    model.first.requires_grad_(False)
    before = model.first.weight.clone()
    inputs, targets = own(0)
    mse_loss(wrapped(inputs), targets).backward()
    optimizer.step()
    is_frozen = torch.equal(before, model.first.weight)
    scaler = ShardedGradScaler(init_scale=4.0)
    kept = model.second.weight.clone()
    optimizer.zero_grad()
    loss = mse_loss(wrapped(inputs), targets)
    scaler.scale(loss).backward()
    if dist.get_rank() == 0:  # one rank's gradients overflow: no rank steps
        grads = [param.grad for param in model.parameters() if param.grad is not None]
        grads[0].view(-1)[0] = float("inf")
    scaler.step(optimizer)
    scaler.update()
    with pytest.raises(InvalidArgument, match="takes the OSS"):
        ShardedDataParallel(model, SGD(model.parameters(), lr=0.1))  # type: ignore[arg-type]  # a mistake
    with pytest.raises(RuntimeError, match="not been consolidated"):
        optimizer.state_dict()
    return [is_frozen, torch.equal(kept, model.second.weight), scaler.get_scale(), wrapped.first is model.first]


def as_fairscale_has_it() -> None:
    """What scripts and frameworks rely on besides numbers."""
    model = net()
    optimizer = OSS(model.parameters(), optim=SGD, lr=0.1)
    wrapped = ShardedDataParallel(model, optimizer)
    assert not wrapped.is_multi_device_module
    assert wrapped.device_type == "cpu"
    inputs, targets = own(0)
    mse_loss(wrapped(inputs), targets).backward()
    for param in model.second.parameters():  # also on ranks that do not own it
        assert param.grad is not None
        assert param.grad.norm() > 0
    with pytest.raises(InvalidArgument, match="no gradients to reduce"):
        wrapped.reduce()
    chained = torch.zeros_like(model.first.weight).requires_grad_(True)
    model.first.weight.grad = chained
    with pytest.raises(RuntimeError, match="don't require grad"):
        wrapped(inputs)


def test_frameworks_find_what_fairscale_has(world: World) -> None:
    world.run(as_fairscale_has_it)


def passes_that_leave_a_branch_out(reduce_buffer_size: int) -> float:
    """Two synchronised passes before a step; the second uses only a part of the model."""
    model, single = net(), net()
    optimizer = OSS(model.parameters(), optim=SGD, lr=0.1)
    wrapped = ShardedDataParallel(model, optimizer, reduce_buffer_size=reduce_buffer_size)
    other = SGD(single.parameters(), lr=0.1)
    for step, with_idle in ((0, True), (1, False)):
        inputs, targets = own(step)
        mse_loss(wrapped(inputs, with_idle=with_idle), targets).backward()
        mse_loss(single(data(step)[0], with_idle=with_idle), data(step)[1]).backward()
    optimizer.step()
    other.step()
    return difference(model, single)


@pytest.mark.parametrize("reduce_buffer_size", [0, 40, 2**23])
def test_a_gradient_is_sent_once_however_many_passes_follow(world: World, reduce_buffer_size: int) -> None:
    assert max(world.run(passes_that_leave_a_branch_out, reduce_buffer_size)) < 1e-6


def test_training_equals_one_process(world: World) -> None:
    for found in world.run(train_in_many_ways, backend="torsh"):
        assert max(found.values()) < 1e-5, found


def test_frozen_parameters_stay_and_one_overflow_skips_all_steps(world: World) -> None:
    assert world.run(freeze_and_overflow) == [[True, True, 2.0, True]] * 2
