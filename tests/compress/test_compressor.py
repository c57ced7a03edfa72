"""GradientCompressor by hand and over a group: the right tensors, at the right steps, whatever the gradients hold."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from tests.bed.world import World
from torsh_distributed import events, regroup
from torsh_distributed.comm.groups.abort import abort
from torsh_distributed.compress.compressor import GradientCompressor, compressed_all_reduce
from torsh_distributed.errors import CompressionError, ConfigurationError, InvalidArgument
from torsh_distributed.launch.worker.init import init
from torsh_distributed.plan import CompressConfig

METHODS = [
    "fp16",
    "int8",
    "nbit:4",
    "sign",
    "ternary",
    "natural",
    "topk:0.1",
    "randomk:0.1",
    "sketch:500",
    "powersgd:2",
]


def config(method: str = "topk:0.1", **settings: Any) -> CompressConfig:
    return CompressConfig(**{"method": method, "warmup_steps": 0, "skip_below_numel": 0, **settings})


# --- by hand --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("method", METHODS)
def test_a_message_brings_back_shape_and_dtype_of_any_gradient(method: str) -> None:
    torch.manual_seed(0)
    gradients = {
        "matrix": torch.randn(20, 30),
        "half": torch.randn(8, 9).half(),
        "brain": torch.randn(50).bfloat16(),
        "double": torch.randn(4, 5, 6).double(),
        "transposed": torch.randn(30, 20).t(),
        "strided": torch.randn(40)[::2],
        "one element": torch.tensor([3.0]),
        "scalar": torch.tensor(3.0),
        "zeros": torch.zeros(7, 7),
        "empty": torch.empty(0, 3),
    }
    sender, receiver = GradientCompressor(config(method)), GradientCompressor(config(method))
    for name, gradient in gradients.items():
        message = sender.compress(name, gradient)
        there = receiver.decompress(message)
        assert (there.shape, there.dtype) == (gradient.shape, gradient.dtype), name
        assert bool(there.isfinite().all()), name
        assert message.method == method
        if name in ("zeros", "empty"):
            assert torch.equal(there, gradient), name
    assert sender.stats.num_tensors == len(gradients)
    assert sender.stats.encode_s > 0
    assert receiver.stats.decode_s > 0


def test_the_error_and_the_ratio_are_those_of_the_message() -> None:
    sender = GradientCompressor(config("topk:0.5"))
    message = sender.compress("w", torch.tensor([3.0, 1.0, -4.0, 2.0]))
    assert message.metadata["error_norm"] == pytest.approx(math.sqrt(5))
    assert message.metadata["original_norm"] == pytest.approx(math.sqrt(30))
    assert sender.stats.relative_error == pytest.approx(math.sqrt(5 / 30))
    assert message.metadata["ratio"] == message.num_bytes / 16
    assert sender.stats.ratio == message.num_bytes / 16
    assert sender.stats.to_dict()["bytes_on_wire"] == message.num_bytes


def methods_at(num_steps: int, **settings: Any) -> str:
    sender = GradientCompressor(config(**settings))
    seen = ""
    for _ in range(num_steps):
        seen += "d" if sender.compress("w", torch.randn(64)).method == "none" else "c"
        sender.step()
    return seen


def test_warm_up_ends_and_the_period_counts_from_there() -> None:
    assert methods_at(5) == "ccccc"
    assert methods_at(6, warmup_steps=3) == "dddccc"
    assert methods_at(9, warmup_steps=2, period=3) == "ddcddcddc"


def heard(method: str, warmup_steps: int, num_steps: int) -> list[tuple[int, str]]:
    """The step and the choice of each event about the start of compression, over some steps by hand."""
    compressor = GradientCompressor(CompressConfig(method=method, warmup_steps=warmup_steps))
    found: list[tuple[int, str]] = []

    def hear(event: events.Event) -> None:
        if isinstance(event, events.DecisionEvent) and event.subject == "start of compression":
            found.append((compressor.num_steps, event.choice))

    unsubscribe = events.subscribe(hear)
    for _ in range(num_steps):
        compressor.compress("w", torch.randn(2000))
        compressor.step()
    unsubscribe()
    return found


def test_warm_up_is_announced_once_and_so_is_its_end() -> None:
    assert heard("topk:0.01", 3, 6) == [(0, "uncompressed until step 3"), (3, "topk:0.01 from step 3 on")]


@pytest.mark.parametrize(("method", "warmup_steps"), [("none", 3), ("topk:0.01", 0)])
def test_nothing_is_announced_without_a_warm_up(method: str, warmup_steps: int) -> None:
    assert heard(method, warmup_steps, 5) == []


def test_a_method_alone_warms_up_for_a_hundred_steps() -> None:
    compressor = GradientCompressor("topk:0.01")
    assert compressor.is_dense_step
    compressor.num_steps = 100
    assert not compressor.is_dense_step


def test_small_and_named_tensors_go_whole() -> None:
    sender = GradientCompressor(config(skip_below_numel=50, skip_names=("*.bias", "embed*")))
    methods = {
        name: sender.compress(name, torch.randn(numel)).method
        for name, numel in {"a.weight": 50, "b.weight": 49, "a.bias": 99, "embedding": 99, "unembed": 99}.items()
    }
    assert methods == {
        "a.weight": "topk:0.1", "b.weight": "none", "a.bias": "none", "embedding": "none", "unembed": "topk:0.1"
    }  # fmt: skip
    assert (sender.stats.num_tensors, sender.stats.num_dense) == (2, 3)


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("feedback", ["none", "ef14", "ef21"])
def test_what_is_not_finite_goes_whole_and_is_not_remembered(feedback: str, bad: float) -> None:
    sender = GradientCompressor(config(error_feedback=feedback))
    sender.compress("w", torch.arange(20.0))
    before = sender.state_dict()
    gradient = torch.arange(20.0)
    gradient[3] = bad
    torch.testing.assert_close(sender.decompress(sender.compress("w", gradient)), gradient, equal_nan=True)
    after = sender.state_dict()
    for kind, kept in before["feedback"].items():
        assert torch.equal(kept["w"], after["feedback"][kind]["w"])
    assert sender.stats.num_nonfinite == 1


def test_gradients_that_cannot_be_compressed_are_refused_by_name() -> None:
    sender = GradientCompressor(config())
    with pytest.raises(InvalidArgument, match="the gradient of embed is sparse"):
        sender.compress("embed", torch.eye(3).to_sparse())
    with pytest.raises(InvalidArgument, match="the gradient of counts is not a floating-point tensor"):
        sender.compress("counts", torch.arange(3))


@pytest.mark.parametrize(
    ("method", "text"),
    [("topq", "did you mean topk"), ("topk:2", "a number from 1e-06 to 1"), ("sign:3", "takes no number")],
)
def test_an_unknown_or_mis_set_method_is_refused_at_once(method: str, text: str) -> None:
    with pytest.raises(ConfigurationError, match=text):
        GradientCompressor(method)


def test_a_message_for_another_method_is_refused() -> None:
    message = GradientCompressor(config("int8")).compress("w", torch.randn(9))
    with pytest.raises(CompressionError, match="a message of method 'int8' reached a compressor of method 'sign'"):
        GradientCompressor(config("sign")).decompress(message)


def test_other_settings_keep_what_was_left_out() -> None:
    sender = GradientCompressor(config("topk:0.5", error_feedback_momentum=1.0))
    sender.compress("w", torch.tensor([4.0, 1.0]))
    sender.update_config("int8")
    assert sender.config.method == "int8"
    torch.testing.assert_close(sender.decompress(sender.compress("w", torch.zeros(2))), torch.tensor([0.0, 1.0]))
    sender.update_config(sender.config.replace(error_feedback="none"))
    assert sender.state_dict()["feedback"] == {}


def test_what_was_left_out_travels_even_once_its_tensor_is_no_longer_compressed() -> None:
    sender = GradientCompressor(config("topk:0.5", error_feedback_momentum=1.0))
    sender.compress("w", torch.tensor([4.0, 1.0]))
    sender.update_config(sender.config.replace(skip_names=("w",)))
    assert sender.decompress(sender.compress("w", torch.tensor([2.0, 2.0]))).tolist() == [2.0, 3.0]
    assert sender.decompress(sender.compress("w", torch.tensor([2.0, 2.0]))).tolist() == [2.0, 2.0]


def test_residuals_can_be_forgotten_for_all_or_for_some() -> None:
    sender = GradientCompressor(config())
    for name in ("a", "b"):
        sender.compress(name, torch.randn(20))
    sender.reset_error_feedback(["a"])
    assert list(sender.state_dict()["feedback"]["residuals"]) == ["b"]
    sender.reset_error_feedback()
    assert sender.state_dict()["feedback"]["residuals"] == {}


@pytest.mark.parametrize("method", ["randomk:0.25", "bernoulli:0.25"])
def test_drawn_elements_make_up_for_the_others_where_no_feedback_does(method: str) -> None:
    for feedback, worth in (("ef14", 1.0), ("none", 4.0)):
        sender = GradientCompressor(config(method, error_feedback=feedback))
        there = sender.decompress(sender.compress("w", torch.ones(64)))
        assert there[there != 0].tolist() == pytest.approx([worth] * int((there != 0).sum()))


def test_state_of_another_kind_of_feedback_is_refused() -> None:
    state = GradientCompressor(config(error_feedback="ef21")).state_dict()
    with pytest.raises(ConfigurationError, match="'ef21', this compressor has 'ef14'"):
        GradientCompressor(config()).load_state_dict(state)


# --- over a group ---------------------------------------------------------------------------------------------


def gradients(step: int, rank: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(100 * step + rank)
    return {
        "weight": torch.randn(30, 40, generator=generator),
        "bias": torch.randn(40, generator=generator),
        "half": torch.randn(300, generator=generator).half(),
        "double": torch.randn(3, generator=generator).double(),
    }


def exact(step: int, num_ranks: int) -> dict[str, Tensor]:
    every = [gradients(step, rank) for rank in range(num_ranks)]
    return {name: torch.stack([one[name].double() for one in every]).mean(0) for name in every[0]}


def bytes_of(tensor: Tensor) -> bytes:
    return tensor.flatten().view(torch.uint8).numpy().tobytes()


def same_everywhere(named: dict[str, Tensor]) -> bool:
    mine = torch.cat([tensor.double().flatten() for tensor in named.values()])
    every = [torch.empty_like(mine) for _ in range(dist.get_world_size())]
    dist.all_gather(every, mine)
    return all(bytes_of(one) == bytes_of(mine) for one in every)


def average(methods: list[str], feedback: str) -> list[tuple[float, bool, float | None]]:
    """For each method: the error summed over steps relative to that of one message, agreement, the ratio."""
    rank, size = dist.get_rank(), dist.get_world_size()
    found = []
    for method in methods:
        compressor = GradientCompressor(
            config(method, error_feedback=feedback, error_feedback_momentum=1.0, skip_below_numel=50, warmup_steps=1)
        )
        drift = torch.zeros(30, 40, dtype=torch.float64)
        scale, agrees = 0.0, True
        for step in range(6):
            named, wanted = gradients(step, rank), exact(step, size)
            compressor.all_reduce_mean(named, group=dist.group.WORLD)
            compressor.step()
            for name in ("bias", "double", *(named if step == 0 else ())):
                torch.testing.assert_close(named[name].double(), wanted[name], rtol=2e-3, atol=1e-3)
            drift += named["weight"].double() - wanted["weight"]
            scale += float(wanted["weight"].norm())
            agrees = agrees and same_everywhere(named)
        found.append((float(drift.norm()) / scale, agrees, compressor.stats.ratio))
    return found


@pytest.mark.parametrize("num_ranks", [1, 2, 3])
def test_means_are_the_same_on_all_ranks_and_errors_do_not_add_up(world: World, num_ranks: int) -> None:
    results = world.run(average, METHODS, "ef14", num_ranks=num_ranks, timeout_s=90)
    for method, *found in zip(METHODS, *results, strict=True):
        for drift, agrees, _ in found:
            assert agrees, method
            assert drift < 1.0, f"{method}: six steps sent less than one"


def bad_gradients() -> None:
    """NaN on one rank alone, in a compressed or a small tensor, is NaN on all, and leaves nothing behind."""
    rank = dist.get_rank()
    for feedback, method in (("ef14", "int8"), ("ef21", "topk:0.1"), ("none", "powersgd:2")):
        compressor = GradientCompressor(config(method, error_feedback=feedback, skip_below_numel=50))
        compressor.all_reduce_mean(gradients(0, rank))
        compressor.step()
        before = compressor.state_dict()
        named = gradients(1, rank)
        if rank == 1:
            named["weight"][3, 4] = math.inf
        compressor.all_reduce_mean(named)
        assert bool(named["weight"].isnan().all())
        assert bool(named["bias"].isfinite().all())
        named = gradients(1, rank)
        if rank == 0:
            named["bias"][1] = math.nan
        compressor.all_reduce_mean(named)
        assert bool(named["bias"][1].isnan())
        after = compressor.state_dict()
        for kind, kept in before["feedback"].items():
            assert torch.equal(kept["weight"], after["feedback"][kind]["weight"])
        assert compressor.stats.num_nonfinite == 2


def odd_tensors() -> None:
    for method in METHODS:
        compressor = GradientCompressor(config(method))
        named = {
            "empty": torch.empty(0, 3),
            "one": torch.tensor([2.0]),
            "zeros": torch.zeros(9),
            "t": torch.ones(6, 4).t(),
        }
        for _ in range(2):
            compressor.all_reduce_mean(named)
            compressor.step()
            assert all(bool(tensor.isfinite().all()) for tensor in named.values()), method
            assert same_everywhere(named), method
        compressor.all_reduce_mean({})
    tensor = torch.full((8,), float(dist.get_rank()))
    assert compressed_all_reduce(tensor, "fp16") is tensor
    assert tensor.tolist() == [0.5] * 8


def too_large_for_half() -> None:
    compressor = GradientCompressor(config("fp16"))
    named = {"w": torch.full((4,), 1e6)}
    compressor.all_reduce_mean(named)
    assert named["w"].tolist() == [math.inf] * 4
    assert compressor.state_dict()["feedback"]["residuals"] == {}
    named = {"w": torch.ones(4)}
    compressor.all_reduce_mean(named)
    assert named["w"].tolist() == [1.0] * 4


def settings_that_differ() -> None:
    rank = dist.get_rank()
    with pytest.raises(ConfigurationError, match=r"rank 0 has config \{'method': 'topk:0.1'\}, rank 1 has .*'int8'"):
        GradientCompressor(config("int8" if rank == 1 else "topk:0.1"), group=dist.group.WORLD)
    compressor = GradientCompressor(config(), group=dist.group.WORLD)
    with pytest.raises(
        ConfigurationError, match=r"rank 0 has config {'warmup_steps': 1}, rank 1 has {'warmup_steps': 2}"
    ):
        compressor.update_config(config(warmup_steps=rank + 1))


def a_kind_that_one_rank_cannot_average() -> None:
    """Sparse, large or small, or complex, on one rank alone: all of them say so, and are where they were."""
    rank = dist.get_rank()
    for method in ("topk:0.1", "auto"):
        compressor = GradientCompressor(config(method, skip_below_numel=10), group=dist.group.WORLD)
        for shape, kind in (((20, 20), "sparse"), ((2, 2), "sparse"), ((20, 20), "not a floating-point tensor")):
            strange = torch.ones(shape).to_sparse() if kind == "sparse" else torch.ones(shape, dtype=torch.complex64)
            named = {"good": torch.full((40,), float(rank)), "odd": strange if rank == 1 else torch.ones(shape)}
            with pytest.raises(InvalidArgument, match=rf"the gradient of odd is {kind}(?s:.*)ranks=\[1\]"):
                compressor.all_reduce_mean(named)
            assert named["good"].tolist() == [float(rank)] * 40, "nothing has changed"
        fine = {"good": torch.full((40,), float(rank))}
        compressor.all_reduce_mean(fine)
        assert same_everywhere(fine)


def steps_apart() -> None:
    """One rank has loaded its state and the other has none: they find together, with one dense step."""
    rank = dist.get_rank()
    alerts: list[events.Event] = []
    end = events.subscribe(alerts.append, events.AlertEvent)
    for feedback in ("ef14", "ef21"):
        compressor = GradientCompressor(config(error_feedback=feedback, warmup_steps=2), group=dist.group.WORLD)
        if rank == 0:
            for step in range(5):
                compressor.compress("weight", gradients(step, 0)["weight"])
                compressor.step()
        named = gradients(7, rank)
        compressor.all_reduce_mean(named)
        torch.testing.assert_close(named["weight"].double(), exact(7, 2)["weight"], rtol=0, atol=12.0)
        compressor.step()
        assert compressor.num_steps == 6
        compressor.all_reduce_mean(named := gradients(8, rank))
        assert same_everywhere(named)
    end()
    assert len(alerts) == 2


def in_turn(*parts: Callable[[], None]) -> None:
    for part in parts:
        part()


def test_whatever_the_gradients_hold_all_ranks_get_the_right_thing_or_the_same_error(world: World) -> None:
    parts = (bad_gradients, odd_tensors, too_large_for_half, settings_that_differ, steps_apart)
    world.run(in_turn, *parts, a_kind_that_one_rank_cannot_average, timeout_s=60)


def resume(method: str, feedback: str, state: dict[str, Any] | None, start: int) -> tuple[Tensor, dict[str, Any]]:
    """Three steps; what they summed up to, and the state after them."""
    compressor = GradientCompressor(
        config(method, error_feedback=feedback, skip_below_numel=50), group=dist.group.WORLD
    )
    if state is not None:
        compressor.load_state_dict(state)
    total = torch.zeros(30, 40)
    for step in range(start, start + 3):
        named = gradients(step, dist.get_rank())
        compressor.all_reduce_mean(named)
        compressor.step()
        total += named["weight"]
    return total, compressor.state_dict()


def resume_each(cases: list[tuple[str, str]]) -> None:
    for method, feedback in cases:
        _, early = resume(method, feedback, None, 0)
        _, middle = resume(method, feedback, early, 3)
        total, _ = resume(method, feedback, middle, 6)
        again, _ = resume(method, feedback, middle, 6)
        assert torch.equal(total, again), "the state is all there is"
        fresh, _ = resume(method, feedback, None, 6)
        assert not torch.equal(total, fresh), "and it makes a difference"
        # All ranks take rank 0's state, as when one rank saves for all: nothing is counted twice.
        shared = [middle if dist.get_rank() == 0 else None]
        dist.broadcast_object_list(shared)
        total, state = resume(method, feedback, shared[0], 6)
        assert same_everywhere({"total": total})
        if feedback == "ef21":
            assert float(off_the_mean(state).norm()) < 1e-4


def test_state_survives_a_round_trip_and_is_right_when_ranks_share_one(world: World) -> None:
    cases = [("topk:0.1", "ef14"), ("topk:0.1", "ef21"), ("powersgd:2", "ef14"), ("sign", "ef14")]
    world.run(resume_each, cases, timeout_s=60)


def lose_a_rank(method: str, feedback: str) -> tuple[bool, float] | None:
    """Three ranks train, rank 1 leaves, the others go on; then a compressor that knows nothing joins in its place."""
    init(backend="gloo")
    compressor = GradientCompressor(
        config(method, error_feedback=feedback, skip_below_numel=50), group=dist.group.WORLD
    )
    me = dist.get_rank()
    for step in range(3):
        compressor.all_reduce_mean(gradients(step, me))
        compressor.step()
    kept = compressor.state_dict()["feedback"]
    dist.barrier()
    if me == 1:
        return None
    abort("rank 1 leaves")
    regroup([0, 2])
    world = dist.group.WORLD
    assert world is not None
    compressor.use_group(world)
    assert compressor.num_steps == 3
    for kind in kept:
        assert torch.equal(compressor.state_dict()["feedback"][kind]["weight"], kept[kind]["weight"])
    if dist.get_rank() == 1:  # a newcomer starts at zero
        compressor = GradientCompressor(compressor.config)
    compressor.use_group(world)
    assert compressor.num_steps == 3
    drift = torch.zeros(1200, dtype=torch.float64)
    agrees = True
    for step in range(3, 9):
        named = gradients(step, dist.get_rank())
        compressor.all_reduce_mean(named)
        compressor.step()
        agrees = agrees and same_everywhere(named)
        if step > 3:  # the first brings what rank 0 had left out before
            drift += (named["weight"].double() - exact(step, 2)["weight"]).flatten()
    if feedback == "ef21":
        drift = off_the_mean(compressor.state_dict())
    return agrees, float(drift.norm())


def off_the_mean(state: dict[str, Any]) -> Tensor:
    """How far the mean that a rank keeps is from the mean of what all ranks keep for themselves."""
    own = state["feedback"]["own"]["weight"].double()
    dist.all_reduce(own)
    difference: Tensor = own / dist.get_world_size() - state["feedback"]["mean"]["weight"]
    return difference


@pytest.mark.parametrize(("method", "feedback"), [("powersgd:2", "ef14"), ("topk:0.1", "ef21")])
def test_after_a_change_of_members_the_rest_goes_on_and_a_newcomer_fits_in(
    world: World, method: str, feedback: str
) -> None:
    results = world.run(lose_a_rank, method, feedback, num_ranks=3, backend=None, timeout_s=60)
    assert results[1] is None
    for agrees, drift in (results[0], results[2]):
        assert agrees
        assert drift < (60 if feedback == "ef14" else 1e-3), "ef14: less than two steps' gradients of this size"
