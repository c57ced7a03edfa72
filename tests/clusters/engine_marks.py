"""The marks of tests that run on a real Ray or Dask, once for all of them."""

from __future__ import annotations

import pytest

_SLOW_TO_START = pytest.mark.timeout(300)
_THEIR_WARNINGS = pytest.mark.filterwarnings("ignore")

RAY = [pytest.mark.needs_library("ray"), _SLOW_TO_START, _THEIR_WARNINGS]
DASK = [pytest.mark.needs_library("distributed"), _SLOW_TO_START, _THEIR_WARNINGS]
