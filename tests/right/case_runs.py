"""Trains a case in plain torch and on ranks, and says how the two compare."""

from __future__ import annotations

import logging
import math
import re
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from tests.right.training_case import PLANS, TrainingCase
from tests.right.training_parts import LOSSES, MODELS, OPTIMIZERS, SCHEDULES, make_data
from torsh_distributed.errors import (
    ConfigurationError,
    FeatureNotAvailable,
    InvalidArgument,
    TensorShapeMismatch,
    TorshError,
)
from torsh_distributed.plan import Plan
from torsh_distributed.train import Engine, parallelize

STEPS = 5
REFUSALS = (ConfigurationError, FeatureNotAvailable, InvalidArgument, TensorShapeMismatch)
TOLERANCE = {"fp32": 5e-4, "bf16": 3e-2}


def _loader(case: TrainingCase) -> DataLoader[Any]:
    return DataLoader(TensorDataset(*make_data(case.padding, case.num_samples)), batch_size=case.batch_size)


def _model(case: TrainingCase) -> nn.Module:
    torch.manual_seed(5)
    return MODELS[case.model]()


def train_alone(case: TrainingCase) -> list[float]:
    """Losses of a plain loop in one process, whole batches, without our code."""
    model = _model(case)
    optimizer = OPTIMIZERS[case.optimizer]([param for param in model.parameters() if param.requires_grad])
    make_schedule = SCHEDULES[case.schedule]
    schedule = None if make_schedule is None else make_schedule(optimizer)
    losses: list[float] = []
    for inputs, targets in _epochs(_loader(case)):
        optimizer.zero_grad()
        with torch.autocast("cpu", torch.bfloat16, enabled=case.precision == "bf16"):
            value = LOSSES[case.loss](model(inputs), targets)
        loss: Tensor = value[0] / value[1] if isinstance(value, tuple) else value
        if not math.isfinite(loss.item()):
            return losses  # nothing in the batch counts
        loss.backward()
        if case.clipping is not None:
            nn.utils.clip_grad_norm_(model.parameters(), case.clipping)
        optimizer.step()
        if schedule is not None:
            schedule.step()
        losses.append(loss.item())
        if len(losses) == STEPS:
            return losses
    raise AssertionError("epochs do not end")


def _epochs(loader: DataLoader[Any]) -> Iterator[Any]:
    while True:
        yield from loader


def _engine(case: TrainingCase) -> Engine:
    training = {
        "steps": STEPS,
        "batch_size": case.batch_size,
        "gradient_accumulation": case.accumulation,
        "gradient_clipping": case.clipping,
        **case.options,
    }
    plan = Plan(training=training, precision={"dtype": case.precision}, **PLANS[case.plan][1])
    return parallelize(
        _model(case),
        OPTIMIZERS[case.optimizer],
        plan,
        loss_fn=LOSSES[case.loss],
        scheduler_fn=SCHEDULES[case.schedule],
    )


def _train_here(case: TrainingCase, num_steps: int) -> list[float]:
    engine = _engine(case)
    losses: list[float] = []
    for batch in engine.batches(_loader(case)):
        losses.append(engine.step(batch))
        if len(losses) == num_steps:
            return losses
        if len(losses) == case.resume_at:
            state = engine.state_dict()
            engine = _engine(case)
            engine.load_state_dict(state)
            for later in engine.batches(_loader(case)):
                losses.append(engine.step(later))
                if len(losses) == num_steps:
                    return losses
            return losses
    return losses


def in_short(verdict: str) -> str:
    """A verdict without what differs from rank to rank and from machine to machine."""
    return re.sub(r"\d[\d.e+-]*", "#", verdict)[:60]


def verdicts_here(cases: list[TrainingCase]) -> list[str]:
    """Runs on every rank: `equal`, `refused: …`, `different: …` or `raw: …` for each case."""
    logging.getLogger("torsh_distributed").setLevel(logging.ERROR)
    return [_verdict(case) for case in cases]


def _verdict(case: TrainingCase) -> str:
    expected = train_alone(case)
    try:
        losses = _train_here(case, len(expected))
    except REFUSALS as error:
        return f"refused: {error.message}"
    except TorshError as error:
        return f"failed: {type(error).__name__}: {error.message}"
    except Exception as error:
        return f"raw: {type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"
    worst = max(
        (abs(one - other) / max(abs(other), 1e-3) for one, other in zip(losses, expected, strict=True)), default=0.0
    )
    if worst <= TOLERANCE[case.precision]:
        return "equal"
    shown = " ".join(f"{value:.5f}" for value in losses)
    return f"different: by {worst:.1e}; {shown} where one process has {' '.join(f'{value:.5f}' for value in expected)}"
