"""Keeps a feed's values fresh on a thread of its own, so that neither training nor metering waits for a network."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Self

from torsh_distributed import events
from torsh_distributed.errors import TorshError
from torsh_distributed.green.carbon.feeds import CarbonFeed, series_of
from torsh_distributed.green.carbon.intensity import Intensity, IntensitySeries

_FIRST_RETRY_S = 10.0
_MOST_RETRY_S = 900.0


class GridWatch:
    """Asks the feed once for each of its periods; after a failure later and later. `note` hears of trouble once."""

    def __init__(self, feed: CarbonFeed, *, note: Callable[[str], None]) -> None:
        self._feed = feed
        self._note = note
        self._series = IntensitySeries(())
        self._told = ""
        self._closing = threading.Event()
        self._has_asked = threading.Event()
        self._thread = threading.Thread(target=self._run, name="torsh-carbon", daemon=True)
        self._thread.start()

    def at(self, time: float) -> Intensity | None:
        """What is known of a moment."""
        return self._series.at(time)

    @property
    def series(self) -> IntensitySeries:
        """All that is known."""
        return self._series

    def wait_for_first(self, timeout_s: float) -> bool:
        """Wait for the first answer, good or bad; whether it came."""
        return self._has_asked.wait(timeout_s)

    def _run(self) -> None:
        delay_s = _FIRST_RETRY_S
        while not self._closing.is_set():
            if self._ask():
                delay_s = _FIRST_RETRY_S
                wait_s = min(self._feed.period_s, 24 * 3600.0)
            else:
                wait_s, delay_s = min(delay_s, self._feed.period_s), min(2 * delay_s, _MOST_RETRY_S)
            self._has_asked.set()
            self._closing.wait(wait_s)

    def _ask(self) -> bool:
        """Ask once; whether it has an answer for now."""
        now = time.time()
        try:
            found = series_of(self._feed, now)
        except TorshError as error:
            return self._trouble(f"{error.message} ({error.hint})" if error.hint else error.message)
        except OSError as error:
            return self._trouble(str(error) or type(error).__name__)
        if found.num_absurd:
            self._trouble(f"{found.num_absurd} values of the feed cannot be true and are left out")
        self._series = found
        return found.at(now) is not None or self._trouble(f"the feed has none for now; it has {found.span()}")

    def _trouble(self, text: str) -> bool:
        if text != self._told:
            self._told = text
            self._note(f"carbon intensity: {text}")
        return False

    def close(self) -> None:
        """Stop asking; a question that is under way ends by its own deadline."""
        self._closing.set()
        self._thread.join(timeout=1.0)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def carbon_event(value: Intensity, now: float) -> events.CarbonEvent:
    """The value as an event."""
    return events.CarbonEvent(
        time=now,
        rank=-1,
        g_per_kwh=value.g_per_kwh,
        source=value.source,
        zone=value.zone,
        signal=value.signal,
        basis=value.basis,
        valid_from=value.start,
        age_s=value.age_s(now),
        is_stale=value.is_stale(now),
        renewable_share=value.renewable_share,
    )
