"""Experts of transformers in bf16: the grouped product computes them, and gradients arrive in fp32."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from typing_extensions import override

from tests.bed.heavy_imports import TRANSFORMERS
from tests.bed.world import World
from tests.parallel.models.zoo import SPECIMENS
from torsh_distributed.parallel.expert.autocast_stacks import cast_expert_stacks
from torsh_distributed.plan import Plan
from torsh_distributed.train import parallelize

pytestmark = [
    pytest.mark.needs_library("transformers"),
    pytest.mark.filterwarnings("ignore:mkldnn_matmul failed"),  # this torch on a CPU without bf16
]

FAMILIES = ["Mixtral", "Qwen2-MoE", "Qwen3-MoE", "gpt-oss", "DeepSeek-V3"]
DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.needs_cuda)]
TOKENS, WIDTH = 64, 32


class _GroupedProducts(TorchDispatchMode):
    """The dtypes that torch's grouped product was called with."""

    def __init__(self) -> None:
        super().__init__()
        self.dtypes: list[torch.dtype] = []

    @override
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if "grouped_mm" in str(func):
            self.dtypes += [one.dtype for one in args[:2]]
        return func(*args, **(kwargs or {}))


def experts(family: str, device: str = "cpu") -> nn.Module:
    """The first module of experts of a small model, with values of a size that matters."""
    torch.manual_seed(0)
    model = SPECIMENS[family].build()
    chosen = next(one for name, one in model.named_modules() if name.endswith("experts"))
    for param in chosen.parameters():
        nn.init.normal_(param, std=0.2)
    return chosen.to(device)


def called(module: nn.Module, device: str = "cpu") -> list[Tensor]:
    """Output and gradients for tokens of which none goes to the last expert."""
    generator = torch.Generator().manual_seed(1)
    hidden = torch.randn(TOKENS, WIDTH, generator=generator).to(device).requires_grad_()
    index = torch.stack([torch.randperm(3, generator=generator)[:2] for _ in range(TOKENS)]).to(device)
    weights = torch.rand(TOKENS, 2, generator=generator).to(device).requires_grad_()
    out: Tensor = module(hidden, index, weights)
    params = list(module.parameters())
    return [out.detach(), *torch.autograd.grad(out.float().square().sum(), [hidden, weights, *params])]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("family", FAMILIES)
def test_the_products_are_in_bf16_and_as_exact_as_that(family: str, device: str) -> None:
    module = experts(family, device)
    exact = called(module, device)
    assert cast_expert_stacks(nn.ModuleDict({"experts": module})) == ["experts"]
    assert [one.dtype for one in module.parameters()] == [torch.float32] * len(list(module.parameters()))
    with torch.autocast(device, dtype=torch.bfloat16), _GroupedProducts() as seen:
        found = called(module, device)
    assert set(seen.dtypes) == {torch.bfloat16}
    assert len(seen.dtypes) >= 4
    for mine, right in zip(found, exact, strict=True):
        assert mine.dtype is torch.float32
        assert (mine - right).norm() <= 0.02 * right.norm()
    for plain, right in zip(called(module, device), exact, strict=True):  # nothing changes outside of autocast
        torch.testing.assert_close(plain, right)


def test_names_and_copies_are_those_of_before() -> None:
    module = experts("Qwen3-MoE")
    names, kind = list(module.state_dict()), type(module)
    cast_expert_stacks(nn.ModuleDict({"experts": module}))
    assert (type(module).__name__, type(module).__qualname__) == (kind.__name__, kind.__qualname__)
    assert isinstance(module, kind)
    twin = copy.deepcopy(module)
    assert list(twin.state_dict()) == list(dict(module.named_parameters())) == names
    assert twin.gate_up_proj is not module.gate_up_proj
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert isinstance(twin.gate_up_proj, Tensor)
        assert twin.gate_up_proj.dtype is torch.bfloat16


@pytest.mark.filterwarnings("ignore:[\\s\\S]*lru_cache")  # of transformers, which dynamo looks through
@pytest.mark.filterwarnings("ignore:Guards may run slower")  # torch's, on Python 3.13.0
def test_a_compiled_layer_has_the_grouped_product_in_one_graph() -> None:
    module = experts("Qwen3-MoE")
    cast_expert_stacks(nn.ModuleDict({"experts": module}))
    graphs: list[torch.fx.GraphModule] = []

    def keep(graph: torch.fx.GraphModule, _: Any) -> Any:
        graphs.append(graph)
        return graph.forward

    compiled: Any = torch.compile(module, backend=keep, fullgraph=True)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        expected = called(module)
        found = called(compiled)
    torch.testing.assert_close(found, expected)
    called_functions = [str(node.target) for graph in graphs for node in graph.graph.nodes]
    assert any("grouped_mm" in name for name in called_functions)
    assert not any("fallback" in name for name in called_functions)


def test_sizes_that_the_kernels_do_not_take_stay_in_fp32() -> None:
    module = nn.Module()
    module.num_experts = 4  # type: ignore[assignment]  # a plain number
    module.up = nn.Parameter(torch.randn(4, 16, 12))
    module.down = nn.Parameter(torch.randn(4, 12, 16))
    assert cast_expert_stacks(nn.ModuleDict({"experts": module})) == []
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert module.up.dtype is torch.float32


def losses_of(plan: dict[str, Any], device: str) -> list[float]:
    torch.manual_seed(0)
    specimen = SPECIMENS["Qwen3-MoE"]
    model = specimen.build().to(device)
    engine = parallelize(model, torch.optim.SGD(model.parameters(), lr=0.1), Plan(precision={"dtype": "bf16"}, **plan))
    rank, degree = engine.strategy.data_rank, engine.strategy.data_degree
    losses = []
    for seed in range(3):
        ids = torch.randint(64, (4, 16), generator=torch.Generator().manual_seed(seed)).to(device)[rank::degree]
        losses.append(engine.step({"input_ids": ids, "labels": ids}))
    return losses


@pytest.mark.ranks
@pytest.mark.parametrize("mesh", [{"dp": 1, "shard": 2}, {"dp": 1, "ep": 2}], ids=["shard", "ep"])
def test_ranks_that_share_experts_train_as_one_process(world: World, mesh: dict[str, int]) -> None:
    [alone] = world.run(losses_of, {}, "cpu", num_ranks=1, imports=TRANSFORMERS)
    for found in world.run(losses_of, mesh, "cpu", num_ranks=2, imports=TRANSFORMERS):
        assert found == pytest.approx(alone, rel=2e-3)
