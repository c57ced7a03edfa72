"""The codecs by the name a plan uses: `make_codec("topk:0.01")`."""

from __future__ import annotations

import importlib

from torsh_distributed.compress.codecs.base import Codec
from torsh_distributed.errors import FeatureNotAvailable, InvalidArgument
from torsh_distributed.plan.sections.compress import METHODS, CompressConfig

_CODECS: dict[str, str] = {
    "none": "linear.cast:Fp32Codec",
    "fp16": "linear.cast:Fp16Codec",
    "bf16": "linear.cast:Bf16Codec",
    "int8": "dense.rounding:Int8Codec",
    "nbit": "dense.rounding:NbitCodec",
    "sign": "dense.sign:SignCodec",
    "majority": "dense.sign:MajorityCodec",
    "ternary": "dense.sign:make_ternary",
    "bimodal": "dense.bimodal:BimodalCodec",
    "natural": "dense.rounding:NaturalCodec",
    "topk": "sparse.magnitude:TopKCodec",
    "threshold": "sparse.magnitude:ThresholdCodec",
    "gaussian": "sparse.magnitude:GaussianCodec",
    "randomk": "sparse.random_choice:RandomKCodec",
    "bernoulli": "sparse.random_choice:BernoulliCodec",
    "sketch": "linear.sketch:SketchCodec",
    "powersgd": "linear.powersgd:PowerSgdCodec",
    "layerwise": "sparse.layerwise:LayerwiseCodec",
}
"""The module in this package and its class or factory, which takes the method's number if there is one.

Imported on first use: a codec may need packages that others do not.
"""


def codec_names() -> list[str]:
    """Every method that is a codec, in the order of the plan's methods."""
    return [name for name in METHODS if name in _CODECS]


def make_codec(method: str) -> Codec:
    """A new codec for a method as a plan spells it: `int8`, `nbit:4`. Raises ConfigurationError for an unknown method.

    `auto` is a choice among codecs, not a codec.
    """
    config = CompressConfig(method=method, error_feedback="none")  # a codec alone has no error feedback
    if config.name == "auto":
        raise InvalidArgument(
            "method 'auto' chooses among codecs and is not one itself",
            hint=f"one of: {', '.join(_CODECS)}",
            method=method,
        )
    if config.name not in _CODECS:
        raise FeatureNotAvailable(
            f"method {config.name!r} has no codec yet", hint=f"one of: {', '.join(_CODECS)}", method=method
        )
    module, _, kind = _CODECS[config.name].partition(":")
    make = getattr(importlib.import_module(f"{__package__}.{module}"), kind)
    wanted, number = METHODS[config.name], config.parameter
    numbers = [] if wanted is None or number is None else [int(number) if wanted.integer else number]
    made = make(*numbers)
    assert isinstance(made, Codec)
    return made
