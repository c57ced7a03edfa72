"""Activation checkpointing: the same numbers with less kept, and what is recomputed is what was asked for."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._python_dispatch import TorchDispatchMode
from typing_extensions import override

from tests.bed.world import World
from tests.parallel.golden import MODELS, golden, gpt
from tests.parallel.sharded.test_module import shard, train_all
from torsh_distributed.errors import ConfigurationError
from torsh_distributed.parallel.activation import activation_bytes, checkpoint_activations
from torsh_distributed.plan import ActivationConfig


class Layer(nn.Module):
    """Keeps a large activation, has dropout and a running count, and says how often it ran."""

    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.up = nn.Linear(8, hidden)
        self.dropout = nn.Dropout(0.5)
        self.down = nn.Linear(hidden, 8)
        self.norm = nn.BatchNorm1d(8)
        self.num_runs = 0

    @override
    def forward(self, x: Tensor) -> Tensor:
        self.num_runs += 1
        out: Tensor = x + self.norm(self.down(self.dropout(torch.tanh(self.up(x)))))
        return out


def model() -> nn.Sequential:
    torch.manual_seed(3)
    return nn.Sequential(*(Layer(hidden) for hidden in (16, 512, 16, 512)))


def gradients(net: nn.Module) -> tuple[list[Tensor], int]:
    """Gradients of one backward under a fixed seed, and the bytes that forward kept for it."""
    torch.manual_seed(5)
    x = torch.randn(32, 8)
    params = {param.untyped_storage().data_ptr() for param in net.parameters()}
    kept: dict[int, int] = {}

    def note(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in params:
            kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    with saved_tensors_hooks(note, lambda tensor: tensor):
        loss = net(x).square().sum()
    loss.backward()
    return [param.grad.clone() for param in net.parameters() if param.grad is not None], sum(kept.values())


def assert_same(net: nn.Module, plain: nn.Module) -> tuple[int, int]:
    ours, kept = gradients(net)
    theirs, kept_plain = gradients(plain)
    for one, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=0)
    for one, other in zip(net.buffers(), plain.buffers(), strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=0)
    return kept, kept_plain


def runs(net: nn.Sequential) -> list[int]:
    return [layer.num_runs for layer in net if isinstance(layer, Layer)]


@pytest.mark.parametrize(("every", "expected"), [(1, [2, 2, 2, 2]), (2, [2, 1, 2, 1]), (4, [2, 1, 1, 1])])
def test_uniform_recomputes_every_nth_layer(every: int, expected: list[int]) -> None:
    net = model()
    chosen = checkpoint_activations(net, ActivationConfig(strategy="uniform", every_n_layers=every))
    assert list(chosen) == [str(index) for index in range(0, 4, every)]
    kept, kept_plain = assert_same(net, model())
    assert kept < kept_plain
    assert runs(net) == expected


def test_by_size_recomputes_what_is_large_from_the_first_step_on() -> None:
    net = model()
    sizes = [activation_bytes(layer, torch.randn(32, 8)) for layer in model()]
    assert sizes[1] > 4 * sizes[0]
    checkpoint_activations(net, ActivationConfig(strategy="by_size", threshold_mb=sizes[1] / 2**20))
    kept, kept_plain = assert_same(net, model())
    assert kept_plain - kept > sizes[1], "both large layers keep nothing but their input"
    assert runs(net) == [2, 3, 2, 3], "one forward of each is for its size; the large ones run again in backward"
    gradients(net)
    assert runs(net) == [3, 5, 3, 5]


def test_measuring_leaves_buffers_and_random_state_alone() -> None:
    layer, x = model()[1], torch.randn(32, 8)
    assert isinstance(layer, Layer)
    before = {name: buffer.clone() for name, buffer in layer.named_buffers()}
    state = torch.get_rng_state()
    hidden_bytes = 32 * 512 * 4
    assert activation_bytes(layer, x) >= hidden_bytes
    assert torch.equal(torch.get_rng_state(), state)
    for name, buffer in layer.named_buffers():
        assert torch.equal(buffer, before[name])


class CountOps(TorchDispatchMode):  # type: ignore[no-untyped-call]  # untyped in torch
    """Counts operations by name."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # untyped in torch
        self.counts: Counter[str] = Counter()

    @override
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.counts[str(func)] += 1
        return func(*args, **(kwargs or {}))


def test_selective_recomputes_all_but_matrix_products() -> None:
    found = {}
    for strategy in ("none", "selective", "uniform"):
        net = model()
        checkpoint_activations(net, ActivationConfig(strategy=strategy, every_n_layers=1))
        with CountOps() as ops:
            gradients(net)
        found[strategy] = ops.counts
    net = model()
    checkpoint_activations(net, ActivationConfig(strategy="selective"))
    assert_same(net, model())
    products, tanh = "aten.addmm.default", "aten.tanh.default"
    assert found["selective"][products] == found["none"][products] < found["uniform"][products]
    assert found["none"][tanh] < found["selective"][tanh] == found["uniform"][tanh]


def test_evaluation_is_not_recomputed() -> None:
    for strategy in ("uniform", "by_size", "selective"):
        net = model()
        checkpoint_activations(net, ActivationConfig(strategy=strategy, threshold_mb=1e-6, every_n_layers=1))
        with torch.no_grad():
            net(torch.randn(4, 8))
        assert runs(net) == [1, 1, 1, 1]


def test_names_stay_and_offload_gives_the_same() -> None:
    net, plain = model(), model()
    checkpoint_activations(net, ActivationConfig(strategy="uniform", offload_to_cpu=True))
    assert list(net.state_dict()) == list(plain.state_dict())
    assert_same(net, plain)


def test_a_model_without_layers_is_refused() -> None:
    with pytest.raises(ConfigurationError, match="has no layers that repeat"):
        checkpoint_activations(nn.Linear(2, 2), ActivationConfig(strategy="uniform"))
    assert checkpoint_activations(nn.Linear(2, 2), ActivationConfig()) == {}


def test_the_blocks_of_a_transformer_are_found() -> None:
    assert list(checkpoint_activations(gpt(), ActivationConfig(strategy="selective"))) == ["blocks.0", "blocks.1"]


CASES = [
    ("gpt", {**shard(2, "full_shard"), "activation": {"strategy": "uniform", "every_n_layers": 1}}),
    ("gpt", {**shard(2, "full_shard", accumulation=2), "activation": {"strategy": "selective"}}),
    (
        "gpt",
        {
            **shard(2, "shard_grad_op", wrap_classes=["Block"]),
            "activation": {"strategy": "by_size", "threshold_mb": 0.01, "offload_to_cpu": True},
        },
    ),
    ("mlp", {"activation": {"strategy": "uniform", "every_n_layers": 2}}),
]


@pytest.mark.matrix
def test_training_with_shards_gives_one_process_losses(world: World) -> None:
    assert set(MODELS) >= {name for name, _ in CASES}
    for curves in world.run(train_all, CASES, backend="torsh", timeout_s=180):
        for (name, sections), curve in zip(CASES, curves, strict=True):
            expected = golden(name)
            assert [loss for loss, _ in curve] == pytest.approx([loss for loss, _ in expected], abs=1e-4), sections
