"""Errors under the types that scripts written for DeepSpeed catch."""

from __future__ import annotations

from torsh_distributed.errors import FeatureNotAvailable, InvalidArgument


class DeepSpeedMistake(InvalidArgument, AssertionError):
    """A call that DeepSpeed refuses with an assertion."""


class NotOfThisEngine(FeatureNotAvailable, AttributeError):
    """A part of DeepSpeed's engine that ours does not have; the message says what to do instead."""


def require(condition: object, message: str, *, hint: str | None = None, **facts: object) -> None:
    """Raise DeepSpeedMistake unless `condition` holds."""
    if not condition:
        raise DeepSpeedMistake(message, hint=hint, **facts)
