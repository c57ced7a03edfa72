"""fp16 and bf16: as torch's scaler does it, with one answer on every rank."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn import functional

from tests.bed.world import World
from tests.train.test_engine import STEPS, build, reference
from torsh_distributed import events
from torsh_distributed.errors import NonFiniteLoss
from torsh_distributed.plan import Plan, PrecisionConfig
from torsh_distributed.train import Engine, parallelize
from torsh_distributed.train.precision import cast_buffers, make_precision

CPU = torch.device("cpu")


def engine_in(dtype: str, accumulation: int = 1, **precision: object) -> tuple[Engine, list[float]]:
    model, optimizer, loader = build()
    plan = Plan.from_dict(
        {
            "precision": {"dtype": dtype, **precision},
            "training": {"steps": STEPS, "gradient_accumulation": accumulation, "gradient_clipping": 5.0},
        }
    )
    engine = parallelize(model, optimizer, plan, loss_fn=functional.cross_entropy)
    seen = set()
    model[0].register_forward_hook(lambda module, args, out: seen.add(out.dtype))
    losses = [engine.step(batch) for batch in engine.batches(loader)]
    assert seen == {{"bf16": torch.bfloat16, "fp16": torch.float16}[dtype]}
    return engine, losses


def losses_in(dtype: str) -> tuple[list[float], list[float], float | None]:
    _, losses = engine_in(dtype)
    engine, accumulated = engine_in(dtype, accumulation=3)
    return losses, accumulated, engine.precision.loss_scale


@pytest.mark.parametrize(("dtype", "num_ranks"), [("bf16", 2), ("fp16", 1), ("fp16", 2)])
def test_low_precision_stays_close_to_single_precision(world: World, dtype: str, num_ranks: int) -> None:
    """The bound: 0.02 in bf16 (8 bits of mantissa), 0.003 in fp16 (11 bits), on losses near 1."""
    for losses, accumulated, scale in world.run(losses_in, dtype, num_ranks=num_ranks):
        assert losses == pytest.approx(reference(), abs=0.02 if dtype == "bf16" else 0.003)
        assert accumulated == pytest.approx(losses, abs=0.02 if dtype == "bf16" else 0.003)
        assert scale == (None if dtype == "bf16" else 65536.0)


def overflow_at_first() -> tuple[list[events.StepEvent], int, int, float | None]:
    """A loss scale that is far too large: steps are skipped until it fits."""
    seen: list[events.StepEvent] = []
    events.subscribe(seen.append, events.StepEvent)  # type: ignore[arg-type]
    engine, losses = engine_in("fp16", init_loss_scale=2.0**24, loss_scale_growth_interval=1000)
    assert len(losses) == STEPS + engine.num_skipped
    return seen, engine.num_steps, engine.num_skipped, engine.precision.loss_scale


def test_a_step_that_overflows_is_skipped_counted_and_seen(world: World) -> None:
    results = world.run(overflow_at_first)
    for seen, num_steps, num_skipped, scale in results:
        skipped = [event for event in seen if event.is_skipped]
        assert num_steps == STEPS
        assert len(skipped) == num_skipped > 0
        assert skipped == seen[:num_skipped]
        assert [event.loss_scale for event in skipped] == [2.0 ** (24 - i) for i in range(num_skipped)]
        assert scale == 2.0 ** (24 - num_skipped)
        assert {event.step for event in skipped} == {1}
        assert skipped[5].loss == skipped[0].loss, "the same batch, an epoch later: nothing was trained on between"
        assert num_skipped == results[0][2]


def overflow_on_one_rank(rank_with_inf: int) -> tuple[bool, float, float]:
    param = nn.Parameter(torch.ones(3))
    optimizer = torch.optim.SGD([param], lr=0.1)
    precision = make_precision(PrecisionConfig(dtype="fp16"), CPU)
    loss = precision.scaled(param.sum())
    loss.backward()
    if torch.distributed.get_rank() == rank_with_inf:
        assert param.grad is not None
        param.grad[1] = float("inf")
    is_done = precision.unscale(optimizer)
    precision.update(optimizer)
    assert precision.loss_scale is not None
    return is_done, param[0].item(), precision.loss_scale


def test_overflow_on_one_rank_is_skipped_by_all(world: World) -> None:
    assert world.run(overflow_on_one_rank, 1) == [(False, 1.0, 32768.0)] * 2
    assert world.run(overflow_on_one_rank, -1) == [(True, pytest.approx(0.9), 65536.0)] * 2


def scales(grads: list[float]) -> tuple[list[float], list[float], float]:
    """Our scale and torch's own after each of some gradients; then the scale a copy went on with."""
    config = PrecisionConfig(dtype="fp16", init_loss_scale=8.0, loss_scale_growth_interval=2)
    ours, found, expected = make_precision(config, CPU), [], []
    plain = torch.amp.GradScaler("cpu", init_scale=8.0, growth_interval=2)
    for grad in grads:
        for is_ours in (True, False):
            param = nn.Parameter(torch.ones(1))
            optimizer = torch.optim.SGD([param], lr=0.1)
            (ours.scaled(param.sum() * grad) if is_ours else plain.scale(param.sum() * grad)).backward()
            if is_ours:
                ours.unscale(optimizer)
                ours.update(optimizer)
                found.append(float(ours.loss_scale or 0))
            else:
                plain.step(optimizer)
                plain.update()
                expected.append(plain.get_scale())
    copy = make_precision(config, CPU)
    copy.load_state_dict(ours.state_dict())
    return found, expected, float(copy.loss_scale or 0)


def test_the_scale_grows_and_backs_off_as_torchs_does(world: World) -> None:
    [(found, expected, copied)] = world.run(scales, [1.0, 1.0, 1.0, float("inf"), 1.0, 1.0, 1.0], num_ranks=1)
    assert found == expected == [8.0, 16.0, 16.0, 8.0, 8.0, 16.0, 16.0]
    assert copied == found[-1]


def never_fits() -> None:
    config = PrecisionConfig(dtype="fp16", init_loss_scale=2.0)
    precision = make_precision(config, CPU)
    for _ in range(5):
        param = nn.Parameter(torch.ones(1))
        optimizer = torch.optim.SGD([param], lr=0.1)
        precision.scaled(param.sum() * float("nan")).backward()
        precision.unscale(optimizer)
        precision.update(optimizer)


def test_overflow_at_every_scale_is_an_error(world: World) -> None:
    with pytest.raises(NonFiniteLoss, match=r"at every loss scale(?s:.*)bf16"):
        world.run(never_fits, num_ranks=1)


def test_floating_buffers_get_their_dtype_and_counters_do_not() -> None:
    model = nn.Sequential(nn.BatchNorm1d(2))
    cast_buffers(model, PrecisionConfig(buffer_dtype="bf16"))
    kinds = {name: buffer.dtype for name, buffer in model.named_buffers()}
    assert kinds == {
        "0.running_mean": torch.bfloat16,
        "0.running_var": torch.bfloat16,
        "0.num_batches_tracked": torch.int64,
    }
    assert model.state_dict()["0.running_mean"].dtype is torch.bfloat16
