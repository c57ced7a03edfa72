"""From the words of a plan to a codec: `make_codec("topk:0.01")`."""

from __future__ import annotations

import importlib

from torsh_distributed.compress.codec import Codec
from torsh_distributed.errors import FeatureNotAvailable, InvalidArgument
from torsh_distributed.plan.compression import METHODS, CompressionConfig

_CODECS: dict[str, str] = {
    "none": "cast:Fp32Codec",
    "fp16": "cast:Fp16Codec",
    "bf16": "cast:Bf16Codec",
    "int8": "int8:Int8Codec",
    "nbit": "nbit:NbitCodec",
    "sign": "sign:SignCodec",
    "majority": "sign:MajorityCodec",
    "ternary": "ternary:make_ternary",
    "bimodal": "bimodal:BimodalCodec",
    "natural": "natural:NaturalCodec",
    "topk": "topk:TopKCodec",
    "threshold": "threshold:ThresholdCodec",
    "gaussian": "gaussian:GaussianCodec",
    "randomk": "randomk:RandomKCodec",
    "bernoulli": "bernoulli:BernoulliCodec",
    "sketch": "sketch:SketchCodec",
    "powersgd": "powersgd:PowerSgdCodec",
    "layerwise": "layerwise:LayerwiseCodec",
}
"""Module of this package and what in it makes the codec, from the method's number where the method has one.

Imported when first asked for: a codec may need what the others do not.
"""


def codec_names() -> list[str]:
    """Every method that is a codec, in the order of the plan's methods."""
    return [name for name in METHODS if name in _CODECS]


def make_codec(method: str) -> Codec:
    """A new codec for a method as a plan spells it: `int8`, `nbit:4`. Raises ConfigurationError for a method unknown.

    `auto` is a choice among codecs, not a codec.
    """
    config = CompressionConfig(method=method, error_feedback="none")  # a codec by itself remembers nothing
    if config.name == "auto":
        raise InvalidArgument(
            "method 'auto' chooses among codecs and is none itself", hint=f"one of: {', '.join(_CODECS)}", method=method
        )
    if config.name not in _CODECS:
        raise FeatureNotAvailable(
            f"no codec does method {config.name!r} yet", hint=f"one of: {', '.join(_CODECS)}", method=method
        )
    module, _, kind = _CODECS[config.name].partition(":")
    make = getattr(importlib.import_module(f"{__package__}.{module}"), kind)
    wanted, number = METHODS[config.name], config.parameter
    numbers = [] if wanted is None or number is None else [int(number) if wanted.integer else number]
    made = make(*numbers)
    assert isinstance(made, Codec)
    return made
