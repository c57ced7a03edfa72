"""Models and updates in fewer bytes: the codecs of `compress`, for one vector at a time.

A codec that leaves values out would make zeros of them in a model, so models take dense codecs only. Both ends derive
the key of a codec's random numbers from the round and the client.
"""

from __future__ import annotations

from functools import lru_cache

import torch
from torch import Tensor

from torsh_distributed.compress.codecs.base import Codec, Key
from torsh_distributed.compress.codecs.registry import codec_names, make_codec
from torsh_distributed.errors import CompressionError, ConfigurationError, InvalidArgument

WHOLE = "none"
"""The method that sends a vector as it is."""
_FOR_GROUPS = ("auto", "majority", "powersgd")
_FOR_MODELS = (WHOLE, "fp16", "bf16", "int8", "nbit", "natural")


def require_upload_method(method: str) -> None:
    """Raise ConfigurationError unless an update can be sent by this method."""
    name = method.partition(":")[0]
    if name in _FOR_GROUPS:
        raise ConfigurationError(
            f"upload {name!r} is a method of ranks that exchange messages, which clients do not",
            hint=f"one of {', '.join(one for one in codec_names() if one not in _FOR_GROUPS)}",
        )
    make_codec(method)


def require_download_method(method: str) -> None:
    """Raise ConfigurationError unless a model can be sent by this method."""
    name = method.partition(":")[0]
    if name not in _FOR_MODELS:
        raise ConfigurationError(
            f"download {name!r} leaves out parts of the model, or is unknown",
            hint=f"one of {', '.join(_FOR_MODELS)}",
        )
    make_codec(method)


@lru_cache(maxsize=16)
def _codec(method: str) -> Codec:
    return make_codec(method)


def encoded(method: str, vector: Tensor, seed: int) -> Tensor:
    """The vector's message. InvalidArgument if the vector has values that are not finite."""
    if not bool(torch.isfinite(vector).all()):
        raise InvalidArgument("it has values that are not finite")
    return _codec(method).encode(vector, Key(seed=seed))


def decoded(method: str, payload: Tensor, like: Tensor, seed: int) -> Tensor:
    """The vector that a message stands for; CompressionError if it is not a message for a vector like this one."""
    if payload.dim() != 1:
        raise CompressionError("a message has one dimension", num_dims=payload.dim())
    return _codec(method).decode(payload, like.numel(), Key(seed=seed)).to(like.dtype)
