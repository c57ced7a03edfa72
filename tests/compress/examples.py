"""How many examples a property of a codec is tried on."""

from __future__ import annotations

from hypothesis import settings

examples = settings(max_examples=60)
