"""Offload in one process: the losses of training without it, memory within the budgets, an unchanged model."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from tests.parallel.offload.models import KB, STEPS, batches, build, config, gpt, loss_of, offloaded, plain
from torsh_distributed import events
from torsh_distributed.errors import InvalidArgument, IoError, MemoryAllocationFailed
from torsh_distributed.parallel.offload import PagedDataParallel

pytestmark = pytest.mark.slow

PLACES: dict[str, dict[str, Any]] = {
    "host": {},
    "on demand": {"prefetch_buffer_size": 0},
    "all resident": {"gpu_memory_budget_gb": 500 * KB, "auto_memory_management": "conservative"},
    "lossless": {"cpu_compression": "lossless"},
    "params stay": {"params": False, "gpu_memory_budget_gb": 200 * KB},
    "grads stay": {"grads": False, "gpu_memory_budget_gb": 200 * KB},
    "half the state stays": {"device_optimizer_ratio": 0.5, "gpu_memory_budget_gb": 200 * KB},
}


@pytest.mark.parametrize("place", PLACES)
def test_losses_are_those_of_training_without_offload(place: str) -> None:
    losses, stats, _ = offloaded(**PLACES[place])
    assert losses == pytest.approx(plain(), abs=1e-6)
    assert losses[-1] < losses[0] - 0.1, "nothing was learned"
    assert 0 < stats.device.peak_bytes <= stats.device.budget_bytes
    assert 0 < stats.host.peak_bytes <= stats.host.budget_bytes


@pytest.mark.parametrize("model", ["tied", "recomputed"])
def test_shared_frozen_unused_reused_and_recomputed_layers(model: str) -> None:
    losses, _, state = offloaded(model, clip=0.3)
    assert losses == pytest.approx(plain(model, clip=0.3), rel=1e-6)  # they are around 12: abs=1e-6 is one bit of them
    if model == "tied":
        assert torch.equal(state["layers.2.unused"], torch.ones(5)), "no gradient, no decay"


@pytest.mark.parametrize(("form", "bound", "ratio"), [("fp16", 2e-3, 0.5), ("bf16", 2e-2, 0.5), ("int8", 5e-2, 0.315)])
def test_small_forms_are_small_and_stay_within_their_bound(form: str, bound: float, ratio: float) -> None:
    losses, stats, _ = offloaded(cpu_compression=form)
    assert losses == pytest.approx(plain(), abs=bound)
    assert stats.compression_ratio == pytest.approx(ratio, abs=0.01)
    # The same values fetched or kept: what is held is what is used, wherever it lies.
    again, _, _ = offloaded(cpu_compression=form, gpu_memory_budget_gb=500 * KB)
    assert again == losses


def test_lossless_reports_the_ratio_it_reached() -> None:
    _, stats, _ = offloaded(cpu_compression="lossless")
    assert stats.compression_ratio is not None
    assert 0.5 < stats.compression_ratio < 0.99
    assert stats.host.peak_bytes <= stats.host.budget_bytes


def test_state_beyond_host_memory_is_read_from_and_written_to_disk(tmp_path: Path) -> None:
    losses, stats, _ = offloaded(disk_dir=str(tmp_path), cpu_memory_budget_gb=60 * KB)
    assert losses == pytest.approx(plain(), abs=1e-6)
    assert stats.disk is not None
    assert stats.host.peak_bytes <= 60 * 1024
    assert stats.disk.peak_bytes > 60 * 1024
    assert stats.disk_read_bytes > STEPS * stats.disk.peak_bytes / 4
    assert stats.disk_written_bytes > STEPS * stats.disk.peak_bytes / 4
    assert list(tmp_path.iterdir()) == []


def test_the_device_holds_no_more_than_its_budget_at_any_moment() -> None:
    """Counted from the storages themselves, not from the budget."""
    model, optimizer = build()
    with PagedDataParallel(model, config()) as paged:
        optimizer = paged.offload_optimizer(optimizer)
        seen: list[int] = []

        def count(*_: Any) -> None:
            flats = [unit.flat.untyped_storage().nbytes() for unit in paged._units]
            grads = [0 if unit.grad is None else unit.grad.untyped_storage().nbytes() for unit in paged._units]
            seen.append(sum(flats) + sum(grads))

        for module in model.modules():
            module.register_forward_hook(count)
        for param in model.parameters():
            param.register_post_accumulate_grad_hook(count)
        for ids, targets in batches(3):
            optimizer.zero_grad()
            loss_of(model, ids, targets).backward()
            optimizer.step()
        total = sum(unit.num_bytes for unit in paged._units)
        assert max(seen) <= 42 * 1024 < total
        assert max(seen) > 20 * 1024
        stats = paged.stats()
        assert stats.num_evictions > 0
        assert stats.num_hits > stats.num_misses > 0
        assert stats.host_to_device_bytes > 3 * total
        assert stats.device_to_host_bytes == 3 * sum(4 * unit.trainable_numel for unit in paged._units)


def test_accumulated_gradients_equal_one_large_batch() -> None:
    model, optimizer = build()
    with PagedDataParallel(model, config()) as paged:
        optimizer = paged.offload_optimizer(optimizer)
        losses = []
        for ids, targets in batches():
            optimizer.zero_grad()
            total = 0.0
            for half in (slice(0, 2), slice(2, 4)):
                with paged.accumulating(is_last=half.start == 2):
                    loss = loss_of(model, ids[half], targets[half]) / 2
                    loss.backward()
                total += loss.item()
            paged.clip_grad_norm(0.3)
            optimizer.step()
            losses.append(total)
    assert losses == pytest.approx(plain(clip=0.3), abs=1e-6)


def test_state_goes_to_plain_torch_and_back() -> None:
    """Ten steps under offload, five in plain torch from its state, five more under offload: as twenty in one."""
    data = list(batches())
    losses: list[float] = []

    def steps(model: nn.Module, optimizer: torch.optim.Optimizer, part: slice) -> None:
        for ids, targets in data[part]:
            optimizer.zero_grad()
            loss = loss_of(model, ids, targets)
            loss.backward()
            optimizer.step()
            losses.append(loss.item())

    model, given = build()
    with PagedDataParallel(model, config()) as paged:
        optimizer = paged.offload_optimizer(given)
        steps(model, optimizer, slice(0, 10))
        saved = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
    assert {name: value.shape for name, value in saved["model"].items()} == {
        name: value.shape for name, value in gpt().state_dict().items()
    }
    other, plain_optimizer = build()
    other.load_state_dict(saved["model"])
    plain_optimizer.load_state_dict(saved["optimizer"])
    steps(other, plain_optimizer, slice(10, 15))
    third, given = build()
    with PagedDataParallel(third, config()) as paged:
        optimizer = paged.offload_optimizer(given)
        third.load_state_dict(other.state_dict())
        optimizer.load_state_dict(plain_optimizer.state_dict())
        steps(third, optimizer, slice(15, 20))
    assert losses == pytest.approx(plain(), abs=1e-6)
    assert loss_of(third, *data[0]).item() < losses[0], "the model works on its own again"


def test_an_optimizer_that_has_trained_brings_its_state_and_its_scheduler() -> None:
    data = list(batches(8))
    results = []
    for offloads in (False, True):
        model, optimizer = build()
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5)
        losses = []
        paged = None
        for number, (ids, targets) in enumerate(data):
            if number == 4 and offloads:
                paged = PagedDataParallel(model, config())
                optimizer = paged.offload_optimizer(optimizer)
            optimizer.zero_grad()
            loss = loss_of(model, ids, targets)
            loss.backward()
            optimizer.step()
            scheduler.step()
            losses.append(loss.item())
        if paged is not None:
            paged.close()
        results.append(losses)
    assert results[1] == pytest.approx(results[0], abs=1e-6)


def test_evaluation_leaves_the_budget_alone() -> None:
    model, _ = build()
    reference, _ = build()
    ids, targets = next(batches(1))
    with PagedDataParallel(model, config()) as paged, torch.no_grad():
        for _ in range(3):
            assert loss_of(model, ids, targets) == loss_of(reference, ids, targets)
        assert paged.stats().device.peak_bytes <= 42 * 1024


class Breaks(torch.autograd.Function):
    """Raises in backward."""

    @staticmethod
    def forward(ctx: Any, values: torch.Tensor) -> torch.Tensor:
        return values.clone()

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> None:
        raise ZeroDivisionError


def test_training_continues_after_a_backward_that_raised() -> None:
    model, optimizer = build()
    losses = []
    with PagedDataParallel(model, config()) as paged:
        optimizer = paged.offload_optimizer(optimizer)
        handle = model.blocks[1].register_forward_hook(lambda module, args, out: Breaks.apply(out))
        with pytest.raises(ZeroDivisionError):
            loss_of(model, *next(batches(1))).backward()
        handle.remove()
        for ids, targets in batches():
            optimizer.zero_grad()
            loss = loss_of(model, ids, targets)
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
        assert paged.stats().device.peak_bytes <= 42 * 1024
        with pytest.raises(InvalidArgument, match="accepts no further parameters"):
            optimizer.add_param_group({"params": [nn.Parameter(torch.ones(1))]})
    assert losses == pytest.approx(plain(), abs=1e-6)


def test_a_parameter_used_while_evicted_fails_on_its_shape() -> None:
    model, _ = build()
    with PagedDataParallel(model, config()), pytest.raises(RuntimeError, match="size"):
        nn.functional.linear(torch.ones(16), model.blocks[0].projection.weight) + torch.ones(16)


def test_memory_pressure_is_relieved_in_order(tmp_path: Path) -> None:
    seen: list[events.PressureEvent] = []
    end = events.subscribe(seen.append, events.PressureEvent)  # type: ignore[arg-type]
    try:
        losses, stats, _ = offloaded(
            auto_memory_management="extreme", gpu_memory_budget_gb=100 * KB, cpu_memory_budget_gb=420 * KB
        )
        rungs = {event.action for event in seen}
        assert rungs >= {"free unused", "smaller form"}
        for event in seen:
            assert event.after_bytes < event.before_bytes or event.action == "shrink prefetch"
            assert event.before_bytes <= event.budget_bytes
        assert stats.compression_ratio is not None
        assert stats.compression_ratio < 0.9
        assert losses == pytest.approx(plain(), abs=5e-2)
        seen.clear()
        losses, _, _ = offloaded(
            auto_memory_management="balanced", cpu_memory_budget_gb=230 * KB, disk_dir=str(tmp_path)
        )
        assert {event.action for event in seen} >= {"offload cold"}
        assert losses == pytest.approx(plain(), abs=1e-6), "only extreme may change results"
    finally:
        end()


def test_a_budget_too_small_for_one_layer_is_refused_with_the_numbers() -> None:
    model, _ = build()
    with pytest.raises(MemoryAllocationFailed, match=r"10240 bytes is too small for blocks\.\d: in use it needs \d+"):
        PagedDataParallel(model, config(gpu_memory_budget_gb=10 * KB))
    assert all(param.numel() for param in model.parameters()), "the model is as it was"


def test_host_memory_that_is_too_small_is_refused_with_a_form_that_fits(tmp_path: Path) -> None:
    model, _ = build()
    with pytest.raises(MemoryAllocationFailed, match=r"would fit as int8 \(\d+ bytes\)"):
        PagedDataParallel(model, config(cpu_memory_budget_gb=60 * KB))
    with pytest.raises(IoError, match="No such file"):
        PagedDataParallel(model, config(disk_dir=str(tmp_path / "missing")))


def test_what_offload_cannot_do_is_refused() -> None:
    model, optimizer = build()
    with PagedDataParallel(model, config()) as paged:
        with pytest.raises(InvalidArgument, match="supports Adam and AdamW, not SGD"):
            paged.offload_optimizer(torch.optim.SGD(model.parameters(), lr=0.1))
        with pytest.raises(InvalidArgument, match="takes no closure"):
            paged.offload_optimizer(optimizer).step(lambda: 0.0)
    mixed = nn.Sequential(nn.Linear(4, 4), nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4).bfloat16()))
    with pytest.raises(InvalidArgument, match="two dtypes"):
        PagedDataParallel(mixed, config())
