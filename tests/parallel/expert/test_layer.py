"""The layer against a dense mixture of experts written out: outputs and every gradient, however experts are spread."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from tests.bed.world import World
from tests.comm.backends.mpi.world import MpiWorld
from tests.parallel.expert.dense_experts import Reference, admitted, capacity
from torsh_distributed import events
from torsh_distributed.errors import ConfigurationError, InvalidArgument, TensorShapeMismatch
from torsh_distributed.parallel.expert.balancing.lending import Lending
from torsh_distributed.parallel.expert.layer import MoELayer, auxiliary_loss
from torsh_distributed.parallel.models.materialize import Materializer
from torsh_distributed.plan.sections.expert import ExpertConfig

DIM, HIDDEN = 6, 10


def tokens_of_all(num_tokens: int) -> Tensor:
    return torch.randn(num_tokens, DIM, generator=torch.Generator().manual_seed(7), dtype=torch.float64)


def layer_of(config: ExpertConfig, **options: Any) -> MoELayer:
    torch.manual_seed(11)
    return MoELayer(DIM, HIDDEN, config, dtype=torch.float64, **options)


def probe(num_tokens: int) -> Tensor:
    """What the outputs are multiplied with, so that each has its own gradient."""
    return torch.randn(num_tokens, DIM, generator=torch.Generator().manual_seed(9), dtype=torch.float64)


def kept(config: ExpertConfig, reference: Reference, tokens: Tensor) -> Tensor | None:
    if config.overflow == "none":
        return None
    experts = (tokens @ reference.params["router.gate.experts.weight"].t()).topk(config.num_experts_per_token).indices
    room = capacity(len(tokens), config.num_experts_per_token, config.num_experts, config.capacity_factor)
    ends = admitted(experts.tolist(), num_experts=config.num_experts, capacity=room, reroute=False)
    return torch.tensor([[factor for _, factor in choices] for choices in ends], dtype=torch.float64)


def dense(config: ExpertConfig, num_tokens: int) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
    """Outputs, gradients of the tokens, and gradients of every parameter, of one process with all tokens."""
    reference = Reference(
        dict(layer_of(config).named_parameters()), config.num_experts_per_token, normalize=config.normalize_weights
    )
    tokens = tokens_of_all(num_tokens).requires_grad_()
    out = reference(tokens, kept(config, reference, tokens.detach()))
    auxiliary = config.load_balance_loss_coeff * reference.balance_loss + config.router_z_loss_coeff * reference.z_loss
    ((out * probe(num_tokens)).sum() / num_tokens + auxiliary).backward()
    assert tokens.grad is not None
    return out.detach(), tokens.grad, {name: param.grad for name, param in reference.params.items()}


def ours(
    config: ExpertConfig, shares: list[int], borrowed: tuple[tuple[int, ...], ...] | None = None
) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
    """The same on this rank, which has its share of the tokens; gradients are put together over the ranks by hand.

    borrowed: by rank, the experts of others that it computes as well.
    """
    num_tokens, rank, size = sum(shares), dist.get_rank(), dist.get_world_size()
    layer = layer_of(config, group=dist.group.WORLD)
    if borrowed is not None:
        layer.lending = Lending(layer.placement, borrowed)
    start = sum(shares[:rank])
    mine = slice(start, start + shares[rank])
    tokens = tokens_of_all(num_tokens)[mine].view(1, -1, DIM).requires_grad_()
    out = layer(tokens)
    # Each rank's part of the loss: the sum over ranks is the loss of one process with all tokens.
    share = shares[rank] / num_tokens
    ((out * probe(num_tokens)[mine]).sum() / num_tokens + share * auxiliary_loss(layer)).backward()
    stats = layer.stats()
    assert stats.num_routed + stats.num_dropped == num_tokens * config.num_experts_per_token
    assert layer.experts.num_local == config.num_experts // (1 if config.placement == "replicated" else size)
    grads = {}
    for name, param in layer.named_parameters():
        assert param.grad is not None
        if name.startswith("experts.") and config.placement == "contiguous":
            parts = [torch.empty_like(param.grad) for _ in range(size)]
            dist.all_gather(parts, param.grad)
            grads[name] = torch.cat(parts)
        else:
            dist.all_reduce(param.grad)
            grads[name] = param.grad
    assert tokens.grad is not None
    return out.detach().flatten(0, 1), tokens.grad.flatten(0, 1), grads


CONFIGS = [
    ExpertConfig(num_experts=4, overflow="none"),
    ExpertConfig(num_experts=8, num_experts_per_token=1, overflow="none"),
    ExpertConfig(num_experts=8, num_experts_per_token=3, overflow="none", normalize_weights=True),
    ExpertConfig(num_experts=4, capacity_factor=0.7),
    ExpertConfig(num_experts=4, overflow="none", placement="replicated"),
]


def compare_all(shares: list[int], configs: list[ExpertConfig]) -> list[Any]:
    return [ours(config, shares) for config in configs]


@pytest.mark.parametrize(
    ("backend", "shares"),
    [("gloo", [23]), ("shm", [13, 10]), ("gloo", [9, 14]), ("torsh", [7, 5, 0, 11]), ("shm", [6, 6, 6, 6])],
    ids=str,
)
def test_outputs_and_gradients_are_those_of_a_dense_mixture(world: World, backend: str, shares: list[int]) -> None:
    """Rank 2 of one case has no token at all, and still holds experts that others need."""
    check(world.run(compare_all, shares, CONFIGS, num_ranks=len(shares), backend=backend, timeout_s=60), shares)


@pytest.mark.needs_mpi
def test_outputs_and_gradients_are_the_same_over_mpi(mpi_world: MpiWorld) -> None:
    check(mpi_world.run(compare_all, [13, 10], CONFIGS, num_ranks=2), [13, 10])


def check(results: list[Any], shares: list[int]) -> None:
    for number, config in enumerate(CONFIGS):
        out, grad_tokens, grads = dense(config, sum(shares))
        torch.testing.assert_close(torch.cat([result[number][0] for result in results]), out)
        torch.testing.assert_close(torch.cat([result[number][1] for result in results]), grad_tokens)
        for result in results:
            for name, grad in grads.items():
                torch.testing.assert_close(result[number][2][name], grad, msg=f"{name} of {config}")
        assert grads["router.gate.experts.weight"].abs().max() > 1e-6


@settings(max_examples=40)
@given(
    num_tokens=st.integers(0, 40),
    num_experts=st.integers(1, 9),
    k=st.integers(1, 4),
    factor=st.floats(0.05, 2.0),
    overflow=st.sampled_from(["drop", "reroute", "none"]),
)
def test_every_token_is_accounted_for(num_tokens: int, num_experts: int, k: int, factor: float, overflow: Any) -> None:
    config = ExpertConfig(
        num_experts=num_experts,
        num_experts_per_token=min(k, num_experts),
        capacity_factor=factor,
        overflow=overflow,
    )
    layer = layer_of(config)
    out = layer(tokens_of_all(num_tokens))
    stats = layer.stats()
    assert out.shape == (num_tokens, DIM)
    assert stats.num_routed + stats.num_dropped == stats.num_choices == num_tokens * config.num_experts_per_token
    assert sum(stats.load) == stats.num_routed
    assert sum(stats.demand) == stats.num_choices
    assert stats.load[stats.most_used] == max(stats.load)
    assert stats.load[stats.least_used] == min(stats.load)
    if overflow == "none":
        assert stats.num_dropped == 0
        assert stats.capacity is None
    else:
        assert stats.capacity is not None
        assert max(stats.load) <= stats.capacity
    (out.sum() + auxiliary_loss(layer)).backward()
    assert all(param.grad is not None and torch.isfinite(param.grad).all() for param in layer.parameters())


def test_a_rerouted_token_goes_to_the_least_loaded_expert_at_half_weight() -> None:
    layer = layer_of(ExpertConfig(num_experts=2, num_experts_per_token=1, overflow="reroute", capacity_factor=1.0))
    with torch.no_grad():
        layer.router.gate.experts.weight.copy_(torch.tensor([[1.0], [-1.0]]).expand(2, DIM))
    tokens = tokens_of_all(4).abs()  # all of them want expert 0, which has room for 2
    out = layer(tokens)
    assert layer.stats().load == (2, 2)
    assert layer.stats().num_rerouted == 2
    probabilities = (tokens @ layer.router.gate.experts.weight.t()).softmax(dim=1)[:, 0]
    for token, (expert, factor) in enumerate([(0, 1.0), (0, 1.0), (1, 0.5), (1, 0.5)]):
        hidden = torch.nn.functional.gelu(tokens[token] @ layer.experts.up[expert])
        torch.testing.assert_close(out[token], factor * probabilities[token] * (hidden @ layer.experts.down[expert]))


def test_entropy_and_balance_loss_distinguish_an_undecided_gate_from_a_certain_one() -> None:
    layer = layer_of(ExpertConfig(num_experts=4, overflow="none"))
    tokens = tokens_of_all(64)
    with torch.no_grad():
        layer.router.gate.experts.weight.zero_()
        layer(tokens)
        assert layer.stats().gate_entropy == pytest.approx(torch.tensor(4.0).log().item())
        layer.router.gate.experts.weight.normal_().mul_(50)
        layer(tokens)
        assert layer.stats().gate_entropy < 0.2
        assert layer.stats().load_variation > 0


@pytest.mark.parametrize("activation", ["relu", "gelu", "silu", "tanh", "swiglu"])
def test_gradients_match_finite_differences_for_every_activation(activation: Any) -> None:
    layer = layer_of(ExpertConfig(num_experts=3, overflow="none"), activation=activation, output_dim=2)

    def run(tokens: Tensor, up: Tensor, down: Tensor) -> Tensor:
        made: Tensor = torch.func.functional_call(layer, {"experts.up": up, "experts.down": down}, (tokens,))
        return made

    inputs = (tokens_of_all(3), layer.experts.up.detach(), layer.experts.down.detach())
    assert torch.autograd.gradcheck(run, [value.clone().requires_grad_() for value in inputs], fast_mode=True)


@pytest.mark.parametrize("initialization", ["xavier", "kaiming", "normal", "uniform", "truncated_normal"])
def test_experts_are_initialised_as_configured(initialization: Any) -> None:
    torch.manual_seed(0)
    layer = MoELayer(64, 256, ExpertConfig(num_experts=4, initialization=initialization))
    expected = {
        "xavier": (2 / (64 + 256)) ** 0.5,
        "kaiming": (2 / 64) ** 0.5,
        "normal": 0.02,
        "uniform": 1 / (3 * 64) ** 0.5,
        "truncated_normal": (2 / (64 + 256)) ** 0.5,
    }[initialization]
    assert float(layer.experts.up.detach().std()) == pytest.approx(expected, rel=0.02)
    assert not torch.equal(layer.experts.up[0], layer.experts.up[1])


def test_a_layer_on_the_meta_device_can_be_materialised_later() -> None:
    with torch.device("meta"):
        layer = MoELayer(DIM, HIDDEN, ExpertConfig(num_experts=4, gate_groups=2, gate_grouping="learned"))
    assert layer.experts.up.is_meta
    Materializer(layer, torch.device("cpu"), init_fn=None, seed=1).make(layer)
    drawn = {name: float(param.detach().abs().sum()) for name, param in layer.named_parameters()}
    assert {name for name, total in drawn.items() if total == 0} == {"experts.up_bias", "experts.down_bias"}
    assert torch.isfinite(layer(tokens_of_all(5).float())).all()


def test_expert_dropout_is_for_training_only() -> None:
    layer = layer_of(ExpertConfig(num_experts=2, overflow="none", dropout=0.5))
    tokens = tokens_of_all(8)
    assert not torch.equal(layer(tokens), layer(tokens))
    layer.eval()
    torch.testing.assert_close(layer(tokens), layer_of(ExpertConfig(num_experts=2, overflow="none"))(tokens))


def test_autocast_computes_experts_in_its_dtype() -> None:
    layer = MoELayer(DIM, HIDDEN, ExpertConfig(num_experts=4, overflow="none"))
    tokens = tokens_of_all(20).float()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        out = layer(tokens)
    assert out.dtype == torch.bfloat16
    torch.testing.assert_close(out.float(), layer(tokens), rtol=0.05, atol=0.02)
    out.float().sum().backward()
    assert layer.experts.up.grad is not None
    assert layer.experts.up.grad.dtype == torch.float32


def test_a_batch_emits_a_routing_event() -> None:
    seen: list[events.RoutingEvent] = []
    end = events.subscribe(seen.append, events.RoutingEvent)  # type: ignore[arg-type]
    layer = layer_of(ExpertConfig(num_experts=4, capacity_factor=0.5))
    layer(tokens_of_all(16))
    end()
    layer(tokens_of_all(16))
    [event] = seen
    stats = dataclasses.asdict(layer.stats())
    for name in ("num_tokens", "num_routed", "num_dropped", "load", "load_variation", "capacity_use", "gate_entropy"):
        assert getattr(event, name) == stats[name]
    assert event.num_dropped > 0
    assert event.duration_s is not None
    assert 0 < event.duration_s < 60


@pytest.mark.needs_cuda
def test_a_decision_on_a_gpu_is_timed_by_the_gpu() -> None:
    """What the host has queued before is no part of it."""
    seen: list[events.RoutingEvent] = []
    end = events.subscribe(seen.append, events.RoutingEvent)  # type: ignore[arg-type]
    layer = MoELayer(DIM, HIDDEN, ExpertConfig(num_experts=4), device="cuda")
    tokens, busy = torch.randn(64, DIM, device="cuda"), torch.randn(8192, 8192, device="cuda")
    layer(tokens)
    torch.cuda.synchronize()
    start, stop = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    start.record()
    for _ in range(30):
        busy @ busy
    stop.record()
    layer(tokens)
    end()
    assert 0 < (seen[-1].duration_s or 0) < start.elapsed_time(stop) / 1e3 / 2


# --- bad input ----------------------------------------------------------------------------------------------------


def test_more_choices_than_experts_are_clamped_with_a_warning_by_hand_and_refused_in_a_plan() -> None:
    config = ExpertConfig(num_experts=3)
    with pytest.warns(UserWarning, match="num_experts_per_token 5 is above the 3 experts"):
        layer = MoELayer(DIM, HIDDEN, config, num_experts_per_token=5)
    assert layer.config.num_experts_per_token == 3
    with pytest.raises(ConfigurationError, match=r"num_experts_per_token 5 is above expert\.num_experts 3"):
        ExpertConfig(num_experts=3, num_experts_per_token=5)


def test_invalid_layers_are_refused() -> None:
    with pytest.raises(ConfigurationError, match=r"capacity_factor.*above 0"):
        ExpertConfig(capacity_factor=0.0)
    with pytest.raises(InvalidArgument, match="hidden_dim must be at least 1"):
        MoELayer(DIM, 0)
    with pytest.raises(InvalidArgument, match=r"unknown activation 'cos'"):
        MoELayer(DIM, HIDDEN, activation="cos")  # type: ignore[arg-type]
    with pytest.raises(InvalidArgument, match="before the first forward"):
        MoELayer(DIM, HIDDEN).stats()
    with pytest.raises(InvalidArgument, match="before the first forward"):
        auxiliary_loss(MoELayer(DIM, HIDDEN))
    with pytest.raises(TensorShapeMismatch, match=r"input_dim=6, got_by_rank=\{0: 5\}"):
        MoELayer(DIM, HIDDEN)(torch.zeros(2, 5))


def refusals() -> list[str]:
    """Every rank meets every refusal, whoever is at fault."""
    rank, world = dist.get_rank(), dist.group.WORLD
    found = []
    for make in (
        lambda: MoELayer(DIM, HIDDEN, ExpertConfig(num_experts=5), group=world),
        lambda: MoELayer(DIM, HIDDEN, ExpertConfig(capacity_factor=1.0 + rank), group=world),
        lambda: MoELayer(DIM, HIDDEN + rank, group=world),
        lambda: MoELayer(DIM, HIDDEN, group=world)(torch.zeros(3, DIM + rank)),
    ):
        try:
            make()
        except (ConfigurationError, TensorShapeMismatch) as error:
            found.append(str(error))
    layer = MoELayer(DIM, HIDDEN, group=world)
    with pytest.raises(InvalidArgument, match="spread already"):
        layer.spread(world)
    return found


def test_a_mistake_on_one_rank_is_refused_on_every_rank_with_the_numbers(world: World) -> None:
    for uneven, capacities, widths, tokens in world.run(refusals):
        assert "expert.num_experts 5 does not spread evenly over mesh.ep 2" in uneven
        assert "rank 0 has capacity_factor 1.0, rank 1 has 2.0" in capacities
        assert "rank 0 has hidden_dim 10, rank 1 has 11" in widths
        assert "got_by_rank={1: 7}" in tokens
