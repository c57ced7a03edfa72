"""The codecs by the name a plan uses: `make_codec("topk:0.01")`."""

from __future__ import annotations

import importlib

from torsh_distributed.compress.codecs.base import Codec
from torsh_distributed.errors import InvalidArgument
from torsh_distributed.plan.sections.compress import METHODS, CompressConfig


def codec_names() -> list[str]:
    """Every method that is a codec, in the order of the plan's methods."""
    return [name for name, kind in METHODS.items() if kind.codec is not None]


def make_codec(method: str) -> Codec:
    """A new codec for a method as a plan spells it: `int8`, `nbit:4`. Raises ConfigurationError for an unknown method.

    `auto` is a choice among codecs, not a codec.
    """
    config = CompressConfig(method=method, error_feedback="none")  # a codec alone has no error feedback
    kind = METHODS[config.name]
    if kind.codec is None:
        raise InvalidArgument(
            f"method {config.name!r} chooses among codecs and is not one itself",
            hint=f"one of: {', '.join(codec_names())}",
            method=method,
        )
    module, _, name = kind.codec.partition(":")
    make = getattr(importlib.import_module(f"{__package__}.{module}"), name)
    wanted, number = kind.number, config.parameter
    numbers = [] if wanted is None or number is None else [int(number) if wanted.integer else number]
    made = make(*numbers)
    assert isinstance(made, Codec)
    return made
