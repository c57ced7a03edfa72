"""What `torsh tune` measured of a run's recommendations, kept beside its events in `tuning/gains.json`."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path

from pydantic import TypeAdapter

from torsh_distributed.errors import ConfigurationError
from torsh_distributed.plan.reading.files import write_atomically
from torsh_distributed.unreadable_data import unreadable_as

_FILE = Path("tuning") / "gains.json"


@dataclass(frozen=True, kw_only=True)
class MeasuredGain:
    """One change, tried: seconds are medians of a step, for the samples of a step as it was."""

    title: str
    variables: dict[str, str]
    """What it was tried with."""
    plan_change: str
    time: float
    """Seconds since the epoch."""
    rounds: int
    was_s: float
    gain_s: float
    low_s: float
    high_s: float
    """The ends of the gain's 95 % interval."""
    predicted_s: float | None

    @property
    def in_words(self) -> str:
        """For `torsh why`."""
        sure = "" if self.low_s > 0 or self.high_s < 0 else ", not to be told from noise"
        return (
            f"{self.gain_s * 1e3:+.2f} ms of {self.was_s * 1e3:.2f} ms a step (95 %: {self.low_s * 1e3:+.2f} to "
            f"{self.high_s * 1e3:+.2f}{sure})"
        )


def measured_gains(run: Path) -> list[MeasuredGain]:
    """Those of a run, oldest first; none if nothing was tried. Raises ConfigurationError for a broken file."""
    path = run / _FILE
    if not path.exists():
        return []
    with unreadable_as(ConfigurationError, "the file of measured gains cannot be read", path=str(path)):
        return TypeAdapter(list[MeasuredGain]).validate_json(path.read_bytes())


def keep_gain(run: Path, gain: MeasuredGain) -> None:
    """Add one; of the same change the newest is kept."""
    others = [one for one in measured_gains(run) if one.variables != gain.variables]
    (run / _FILE).parent.mkdir(exist_ok=True)
    write_atomically(run / _FILE, json.dumps([asdict(one) for one in (*others, gain)], indent=1))
