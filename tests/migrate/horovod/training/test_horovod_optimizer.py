"""DistributedOptimizer against one process that trains on the whole batch."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import torsh_distributed.migrate.horovod as hvd
from tests.bed.world import World

STEPS, ROWS = 5, 12


class Net(nn.Module):
    """Shared and unused layers, a sparse embedding, two dtypes of use."""

    def __init__(self, sparse: bool = False) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.embedding = nn.Embedding(11, 6, sparse=sparse)
        self.first = nn.Linear(6, 6)
        self.last = nn.Linear(6, 3)
        self.unused = nn.Linear(2, 2)

    def forward(self, words: Tensor) -> Tensor:
        return self.last(torch.tanh(self.first(torch.tanh(self.first(self.embedding(words))))))


def batch(step: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(step)
    return torch.randint(0, 11, (ROWS,), generator=generator), torch.randn(ROWS, 3, generator=generator)


def loss_of(model: nn.Module, words: Tensor, target: Tensor) -> Tensor:
    return functional.mse_loss(model(words), target)


def plain(kind: str, *, clip: bool = False, sparse: bool = False) -> dict[str, Tensor]:
    model = Net(sparse)
    optimizer = OPTIMIZERS[kind](model)
    for step in range(STEPS):
        optimizer.zero_grad()
        loss_of(model, *batch(step)).backward()
        model.unused.weight.grad = torch.zeros_like(model.unused.weight)  # zeros, as Horovod leaves them
        model.unused.bias.grad = torch.zeros_like(model.unused.bias)
        if clip:
            nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        optimizer.step()
    return model.state_dict()


OPTIMIZERS: dict[str, Any] = {
    "sgd": lambda model: torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9),
    "adam": lambda model: torch.optim.Adam(model.parameters(), lr=0.01),
    "bare": lambda model: torch.optim.SGD(model.parameters(), lr=0.1),
}


def train(
    kind: str,
    *,
    clip: bool = False,
    sparse: bool = False,
    passes: int = 1,
    by_group: int = 0,
    keep_grads: bool = False,
    with_closure: bool = False,
    **options: Any,
) -> dict[str, Tensor]:
    """Training on this rank's share of each batch."""
    me, size = hvd.rank(), hvd.size()
    model = Net(sparse)
    if me:
        with torch.no_grad():
            model.first.weight.zero_()
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    if by_group:
        options["groups"] = [[model.first.weight, model.last.bias], [model.first.bias]]
    optimizer = hvd.DistributedOptimizer(
        OPTIMIZERS[kind](model),
        named_parameters=model.named_parameters(),
        backward_passes_per_step=passes,
        **options,
    )
    assert type(optimizer).__name__ in ("SGD", "Adam")
    assert isinstance(optimizer, torch.optim.Optimizer)
    scheduler = torch.optim.lr_scheduler.ConstantLR(optimizer, factor=1.0)
    hvd.broadcast_optimizer_state(optimizer, root_rank=0)
    for step in range(STEPS):
        words, target = (part[me::size] for part in batch(step))
        optimizer.zero_grad(set_to_none=not keep_grads)
        if with_closure:

            def closure(words: Tensor = words, target: Tensor = target) -> Tensor:
                loss = loss_of(model, words, target)
                loss.backward()
                return loss

            optimizer.step(closure)
            continue
        for part in range(passes):
            (loss_of(model, words[part::passes], target[part::passes]) / passes).backward()
        if clip:
            optimizer.synchronize()
            nn.utils.clip_grad_norm_(model.parameters(), 0.1)
            with optimizer.skip_synchronize():
                optimizer.step()
        else:
            optimizer.step()
        scheduler.step()
    return model.state_dict()


CASES: list[tuple[str, dict[str, Any], dict[str, Any]]] = [
    ("sgd", {}, {}),
    ("adam", {}, {}),
    ("adam", {"clip": True}, {"clip": True}),
    ("sgd", {"passes": 2}, {}),
    ("sgd", {"groups": 2}, {}),
    ("sgd", {"by_group": 1, "keep_grads": True}, {}),
    ("sgd", {"gradient_predivide_factor": 2.0}, {}),
    ("sgd", {"with_closure": True}, {}),
    ("bare", {"sparse": True}, {"sparse": True}),
    ("adam", {"sparse": True, "sparse_as_dense": True}, {}),
]
CLOSE: list[tuple[str, dict[str, Any]]] = [
    ("sgd", {"compression": hvd.Compression.fp16}),
    ("sgd", {"compression": hvd.Compression.bf16}),
]


class Halves:
    """A script's own compression: half the value, half the precision is not needed."""

    @staticmethod
    def compress(tensor: Tensor) -> tuple[Tensor, Any]:
        return tensor.double() / 2, tensor.dtype

    @staticmethod
    def decompress(tensor: Tensor, ctx: Any) -> Tensor:
        return (tensor * 2).to(ctx)


def run_cases() -> list[dict[str, Tensor]]:
    hvd.init()
    results = [train(kind, **options) for kind, options, _ in CASES]
    results += [train(kind, **options) for kind, options in CLOSE]
    results.append(train("sgd", compression=Halves))
    codec = hvd.Compression.codec("int8", warmup_steps=0, skip_below_numel=0)
    results.append(train("sgd", compression=codec))
    rules()
    parts_of_a_model()
    out_of_data()
    return results


def rules() -> None:
    """Mistakes raise as Horovod's do."""
    model = nn.Linear(3, 2)
    sgd = torch.optim.SGD(model.parameters(), lr=0.1)
    named = list(model.named_parameters())
    for options, words in (
        ({"named_parameters": [("a", model.weight), ("a", model.bias)]}, "unique"),
        ({"named_parameters": named[:1]}, "not named"),
        ({"named_parameters": [model.weight]}, "tuples"),
        ({"gradient_predivide_factor": 2.0, "op": hvd.Sum}, "Average"),
        ({"backward_passes_per_step": 0}, "above 0"),
        ({"groups": -1}, "groups"),
        ({"groups": [[model.weight, "x"]]}, "parameters"),
        ({"groups": [[model.weight], [model.weight]]}, "one group"),
    ):
        with pytest.raises(ValueError, match=words):
            hvd.DistributedOptimizer(sgd, **options)
    with pytest.warns(DeprecationWarning, match="num_groups"):
        hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), num_groups=1)
    model = nn.Linear(3, 2)
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1))
    assert set(optimizer._parameter_names.values()) == {"allreduce.noname.0.0", "allreduce.noname.0.1"}
    model(torch.ones(3)).sum().backward()
    with pytest.raises(AssertionError, match="zero_grad"):
        optimizer.zero_grad()
    optimizer.synchronize()
    with pytest.warns(UserWarning, match=r"optimizer.step\(\) called without optimizer.skip_synchronize\(\)") as seen:
        optimizer.step()
    assert len(seen) == 1
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        optimizer.zero_grad()
        model(torch.ones(3)).sum().backward()
        optimizer.step()
    model(torch.ones(3)).sum().backward()
    with pytest.raises(AssertionError, match="backward_passes_per_step"):
        model(torch.ones(3)).sum().backward()
    optimizer.synchronize()
    frozen = nn.Linear(3, 2)
    frozen.bias.requires_grad_(False)
    optimizer = hvd.DistributedOptimizer(
        torch.optim.SGD(frozen.parameters(), lr=0.1), named_parameters=frozen.named_parameters()
    )
    frozen.bias.requires_grad_(True)
    frozen(torch.ones(3)).sum().backward()
    with pytest.raises(ValueError, match="bias was unfrozen after"):
        optimizer.step()
    with pytest.raises(ValueError, match="LBFGS"):
        hvd.broadcast_optimizer_state(torch.optim.LBFGS(model.parameters()), root_rank=0)
    with pytest.raises(ValueError, match="state_dict"):
        hvd.broadcast_parameters(model.named_parameters(), root_rank=0)


def parts_of_a_model() -> None:
    """Each rank uses a head of its own: all heads get gradients, also where a gradient is sparse on one rank only."""
    me, size = hvd.rank(), hvd.size()
    torch.manual_seed(0)
    heads = nn.ModuleList(nn.Linear(4, 1) for _ in range(size))
    table = nn.Embedding(5, 4, sparse=True)
    params = [*heads.parameters(), *table.parameters()]
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD(params, lr=1.0))
    inputs = table(torch.tensor([1, me])) if me == 0 else torch.ones(2, 4)
    heads[me](inputs).sum().backward()
    optimizer.synchronize()
    for index, head in enumerate(heads):
        assert head.bias.grad is not None
        assert head.bias.grad.item() == pytest.approx(2 / size), index
    assert table.weight.grad is not None
    assert table.weight.grad.is_sparse
    rows = table.weight.grad.to_dense()
    torch.testing.assert_close(rows[1], heads[0].weight[0].detach() / size)
    with optimizer.skip_synchronize():
        optimizer.step()
    gathered = hvd.allgather(table.weight.detach().reshape(1, -1))
    assert torch.equal(gathered[0], gathered[-1])


def out_of_data() -> None:
    """Ranks with fewer batches join: the others train on, over all ranks."""
    me, size = hvd.rank(), hvd.size()
    torch.manual_seed(1)
    model = nn.Linear(300, 300)  # large enough to be reduced in shared memory
    alone = nn.Linear(300, 300)
    alone.load_state_dict(model.state_dict())
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1))
    reference = torch.optim.SGD(alone.parameters(), lr=0.1)
    for step in range(4):
        present = [rank for rank in range(size) if step < 2 or rank == size - 1]
        inputs = {rank: torch.full((2, 300), 0.01 * (rank + 1)) for rank in present}
        reference.zero_grad()
        for one in inputs.values():
            (alone(one).square().mean() / size).backward()
        reference.step()
        if me in present:
            optimizer.zero_grad()
            model(inputs[me]).square().mean().backward()
            optimizer.step()
    assert hvd.join() == size - 1
    hvd.broadcast_parameters(model.state_dict(), root_rank=size - 1)
    torch.testing.assert_close(model.state_dict(), alone.state_dict())


def test_training_equals_one_process_on_the_whole_batch(world: World) -> None:
    results = world.run(run_cases, num_ranks=2, backend=None, timeout_s=60.0)
    for first, second in zip(*results, strict=True):
        torch.testing.assert_close(first, second, rtol=0, atol=0)
    for (kind, _, options), got in zip(CASES, results[0], strict=False):
        torch.testing.assert_close(got, plain(kind, **options), rtol=1e-4, atol=1e-5)
    for got in results[0][len(CASES) :]:
        torch.testing.assert_close(got, plain("sgd"), rtol=0.05, atol=0.01)


WORDS = [[[0, 1], [1, 4]], [[2], [4, 4]], [[3, 3], []]]
"""By step and rank; in the last step one rank has none, and so no gradient."""


def _table() -> nn.Embedding:
    torch.manual_seed(0)
    return nn.Embedding(6, 3, sparse=True)


def sparse_adam() -> Tensor:
    hvd.init()
    table = _table()
    optimizer = hvd.DistributedOptimizer(torch.optim.SparseAdam(table.parameters(), lr=0.1), sparse_as_dense=True)
    for by_rank in WORDS:
        optimizer.zero_grad()
        mine = by_rank[hvd.rank()]
        if mine:
            table(torch.tensor(mine)).square().sum().backward()
        optimizer.step()
        assert table.weight.grad is not None
        assert table.weight.grad.is_sparse
    return table.weight.detach()


def test_sparse_gradients_that_travel_as_dense_ones_are_sparse_again_for_the_optimizer(world: World) -> None:
    table = _table()
    optimizer = torch.optim.SparseAdam(table.parameters(), lr=0.1)
    for by_rank in WORDS:
        optimizer.zero_grad()
        words = torch.tensor([word for mine in by_rank for word in mine])
        (table(words).square().sum() / len(by_rank)).backward()
        optimizer.step()
    for weight in world.run(sparse_adam, num_ranks=2, backend=None):
        torch.testing.assert_close(weight, table.weight.detach())


def adasum_training() -> dict[str, Tensor]:
    hvd.init()
    me = hvd.rank()
    torch.manual_seed(0)
    model = nn.Linear(4, 2)
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), op=hvd.Adasum)
    optimizer.synchronize()
    with pytest.raises(AssertionError, match="Adasum"), optimizer.skip_synchronize():
        pass
    for step in range(3):
        generator = torch.Generator().manual_seed(step)
        points = torch.randn(8, 4, generator=generator)
        optimizer.zero_grad()
        # Both ranks have the same data: Adasum of equal steps is one step.
        model(points).square().mean().backward()
        optimizer.step()
    assert hvd.allgather(model.weight.detach().reshape(1, -1)).unique(dim=0).shape[0] == 1, me
    return model.state_dict()


def test_adasum_of_equal_steps_is_the_step(world: World) -> None:
    torch.manual_seed(0)
    model = nn.Linear(4, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(3):
        points = torch.randn(8, 4, generator=torch.Generator().manual_seed(step))
        optimizer.zero_grad()
        model(points).square().mean().backward()
        optimizer.step()
    for state in world.run(adasum_training, num_ranks=2, backend=None):
        torch.testing.assert_close(state, model.state_dict())


def norms() -> tuple[Tensor, ...]:
    hvd.init()
    me = hvd.rank()
    torch.manual_seed(0)
    whole = torch.randn(6, 3, 4)
    mine = whole[:4] if me == 0 else whole[4:]
    layer = hvd.SyncBatchNorm(3)
    with torch.no_grad():
        layer.weight.copy_(torch.tensor([1.0, 2.0, 3.0]))
    mine = mine.clone().requires_grad_(True)
    out = layer(mine)
    (out * torch.arange(float(out.numel())).view_as(out).cos()).sum().backward()
    layer.eval()
    assert layer(mine).shape == mine.shape
    with pytest.raises(ValueError, match="2D"):
        layer(torch.ones(3))
    return out.detach(), mine.grad, layer.running_mean, layer.running_var, layer.weight.grad


def test_batch_norm_is_that_of_the_whole_batch(world: World) -> None:
    results = world.run(norms, num_ranks=2, backend=None)
    torch.manual_seed(0)
    whole = torch.randn(6, 3, 4, requires_grad=True)
    layer = nn.BatchNorm1d(3)
    with torch.no_grad():
        layer.weight.copy_(torch.tensor([1.0, 2.0, 3.0]))
    out = layer(whole)
    weights = torch.cat([torch.arange(48.0).view(4, 3, 4).cos(), torch.arange(24.0).view(2, 3, 4).cos()])
    (out * weights).sum().backward()
    torch.testing.assert_close(torch.cat([one[0] for one in results]), out.detach())
    torch.testing.assert_close(torch.cat([one[1] for one in results]), whole.grad)
    torch.testing.assert_close(results[1][2], layer.running_mean)
    torch.testing.assert_close(results[1][3], layer.running_var)
    torch.testing.assert_close(results[0][4] + results[1][4], layer.weight.grad)
