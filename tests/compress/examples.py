"""How many examples a property of a codec is tried on: the same ones at every run."""

from __future__ import annotations

from hypothesis import settings

examples = settings(deadline=None, derandomize=True, max_examples=60)
