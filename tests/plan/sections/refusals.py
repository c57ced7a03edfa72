"""How tests of sections state what is refused."""

from __future__ import annotations

from typing import Any

import pytest

from torsh_distributed.errors import ConfigurationError
from torsh_distributed.plan import Plan


def expect_refusal(document: dict[str, dict[str, Any]], message: str, hint: str) -> None:
    """The plan of `document` is refused with exactly this message and hint."""
    with pytest.raises(ConfigurationError) as caught:
        Plan.from_dict(document)
    assert caught.value.message == f"plan: {message}"
    assert caught.value.hint == hint
