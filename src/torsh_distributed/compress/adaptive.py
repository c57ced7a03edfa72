"""AdaptiveCompression: how much to send, adapted during training by the compression error or by the loss.

`auto` decides which codec is fastest; this decides how much a codec may leave out, under `compress.adapt` after every
step of an Engine. Both emit events.
"""

from __future__ import annotations

import statistics
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

import torch

from torsh_distributed import events
from torsh_distributed.comm.collectives.reductions import all_reduce
from torsh_distributed.compress.compressor_state import CompressorState
from torsh_distributed.errors import InvalidArgument
from torsh_distributed.plan import CompressConfig
from torsh_distributed.plan.sections.compress import ADAPTABLE, METHODS

_NUM_RECORDS = 10
_SHARES = (0.0001, 1.0)
_LEAST_BITS = 2  # with one, error feedback diverges


class AdaptationStrategy(StrEnum):
    """What moves the setting, and how fast."""

    CONSERVATIVE = "conservative"
    AGGRESSIVE = "aggressive"
    LOSS_AWARE = "loss_aware"


@dataclass(frozen=True, kw_only=True)
class _Pace:
    every: int
    """Steps between two decisions."""
    change: float
    """Relative change of the setting at a decision."""
    send_less_below: float
    send_more_above: float
    """Impacts between which nothing changes."""


_PACES = {
    AdaptationStrategy.CONSERVATIVE: _Pace(every=100, change=0.1, send_less_below=0.01, send_more_above=0.05),
    AdaptationStrategy.AGGRESSIVE: _Pace(every=10, change=0.2, send_less_below=0.005, send_more_above=0.02),
    AdaptationStrategy.LOSS_AWARE: _Pace(every=10, change=0.0, send_less_below=0.0, send_more_above=0.0),
}


class AdaptiveCompression:
    """Adapts the number of a compressor's method, such as the share of topk; every rank of the group makes one.

    Call `step(loss)` after each training step, on every rank. `impact` returns how much compression hurts (a relative
    loss of accuracy, from your own validation); without it the relative error of the messages is used, as the
    compressor measures it. A small impact sends fewer bytes, a large one more. `loss_aware` uses the loss alone: the
    steadier it is, the less is sent. All ranks decide on the mean of what they recorded.
    """

    def __init__(
        self,
        compressor: CompressorState,
        strategy: AdaptationStrategy | str = AdaptationStrategy.CONSERVATIVE,
        *,
        impact: Callable[[], float] | None = None,
    ) -> None:
        self.strategy = AdaptationStrategy(strategy)
        self._compressor = compressor
        self._impact = impact
        self._records: deque[float] = deque(maxlen=_NUM_RECORDS)
        self._num_steps = 0
        if self.strategy is not AdaptationStrategy.LOSS_AWARE:
            self._check_number()

    def step(self, loss: float | None = None) -> None:
        """Record this step and decide if it is time to; only `loss_aware` needs `loss`."""
        self._num_steps += 1
        seen = self._seen(loss)
        if seen is not None:
            self._records.append(seen)
        pace = _PACES[self.strategy]
        if self._num_steps % pace.every:
            return
        mean = self._agreed()
        if mean is None:
            return
        if self.strategy is AdaptationStrategy.LOSS_AWARE:
            self._adopt(settings_for_stability(mean, self._compressor.config), f"stability of the loss {mean:.3f}")
        elif mean < pace.send_less_below:
            self._scale(1 - pace.change, f"impact {mean:.4f} is below {pace.send_less_below}: fewer bytes")
        elif mean > pace.send_more_above:
            self._scale(1 + pace.change, f"impact {mean:.4f} is above {pace.send_more_above}: more bytes")

    def state_dict(self) -> dict[str, Any]:
        """What it has recorded; the compressor's own state has the method."""
        return {"num_steps": self._num_steps, "records": list(self._records)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from `state_dict()`; every rank loads its own."""
        self._num_steps = int(state["num_steps"])
        self._records = deque(state["records"], maxlen=_NUM_RECORDS)

    def _seen(self, loss: float | None) -> float | None:
        if self.strategy is not AdaptationStrategy.LOSS_AWARE:
            return self._compressor.stats.relative_error if self._impact is None else self._impact()
        if loss is None:
            raise InvalidArgument("loss_aware needs the loss", hint="call step(loss)")
        return loss

    def _agreed(self) -> float | None:
        """The mean over records and ranks: impact, or the stability of the loss. None if no rank has any."""
        records = list(self._records)
        own = [loss_stability(records)] if self.strategy is AdaptationStrategy.LOSS_AWARE else records
        totals = torch.tensor([sum(own), float(len(own))], dtype=torch.float64)
        if self._compressor.group is not None:
            all_reduce(totals, group=self._compressor.group)
        total, count = totals.tolist()
        return total / count if count else None

    def _scale(self, factor: float, reason: str) -> None:
        config = self._compressor.config
        wanted, number = METHODS[config.name].number, config.parameter
        assert wanted is not None
        assert number is not None
        least, most = (wanted.least, wanted.most) if wanted.integer else _SHARES
        if config.name == "nbit":
            least = _LEAST_BITS
        if wanted.integer:
            moved = number + (1 if factor > 1 else -1) * max(1, round(abs(factor - 1) * number))
        else:
            moved = number * factor
        moved = min(max(moved, least), most)
        text = f"{int(moved)}" if wanted.integer else f"{moved:.6g}"
        self._adopt(config.replace(method=f"{config.name}:{text}"), reason)

    def _adopt(self, config: CompressConfig, reason: str) -> None:
        if config == self._compressor.config:
            return
        self._compressor.update_config(config)
        choice = f"{config.method}, every {config.period} steps"
        events.emit(events.DecisionEvent(subject="strength of compression", choice=choice, reason=reason))

    def _check_number(self) -> None:
        config = self._compressor.config
        if config.name not in ADAPTABLE:
            raise InvalidArgument(
                f"method {config.method!r} has no number for how much is sent",
                hint=f"use one of {', '.join(ADAPTABLE)}; or the strategy loss_aware",
                method=config.method,
            )


def loss_stability(losses: list[float]) -> float:
    """1 - min(1, std / |mean|) of the last ten losses; 1 if there are fewer."""
    last = losses[-_NUM_RECORDS:]
    if len(last) < _NUM_RECORDS:
        return 1.0
    mean = statistics.fmean(last)
    return 1 - min(1.0, statistics.pstdev(last) / abs(mean)) if mean else 0.0


def settings_for_stability(stability: float, config: CompressConfig) -> CompressConfig:
    """A steady loss allows strong compression at every step; an unsteady one gets 16 bits, one step in four."""
    if stability > 0.9:
        return config.replace(method="topk:0.001", period=1)
    if stability > 0.7:
        return config.replace(method="topk:0.01", period=2)
    return config.replace(method="bf16", period=4)
