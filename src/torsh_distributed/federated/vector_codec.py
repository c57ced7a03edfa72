"""Models and updates in fewer bytes: the codecs of `compress`, for one vector at a time.

A codec that leaves values out would make zeros of them in a model, so models take dense codecs only. Both ends derive
the key of a codec's random numbers from the round and the client. Buffers travel whole behind what was encoded: a
variance that is only near may be negative. Of an update, frozen parameters do not travel.
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


def encoded(method: str, vector: Tensor, seed: int, num_coded: int, num_parameters: int) -> Tensor:
    """The vector's message: the first `num_coded` values by the codec, and those behind the parameters whole.

    InvalidArgument if values of the first are not finite.
    """
    if not bool(torch.isfinite(vector[:num_coded]).all()):
        raise InvalidArgument("it has values that are not finite")
    payload = _codec(method).encode(vector[:num_coded], Key(seed=seed))
    rest = vector[num_parameters:]
    if not rest.numel():
        return payload
    has_rest = bool(rest.any())
    parts = [payload, rest] if has_rest else [payload]
    flag = torch.tensor([has_rest], dtype=torch.uint8)
    return torch.cat([*(part.view(torch.uint8) for part in parts), flag])


def decoded(method: str, payload: Tensor, like: Tensor, seed: int, num_coded: int, num_parameters: int) -> Tensor:
    """The vector that a message stands for; CompressionError if it is not a message for a vector like this one."""
    if payload.dim() != 1:
        raise CompressionError("a message has one dimension", num_dims=payload.dim())
    vector = torch.zeros_like(like)
    rest = vector[num_parameters:]
    if rest.numel():
        payload = _without_rest(method, payload, rest)
    vector[:num_coded] = _codec(method).decode(payload, num_coded, Key(seed=seed))
    return vector


def _without_rest(method: str, message: Tensor, rest: Tensor) -> Tensor:
    """What the codec made; the values behind it are written to `rest`."""
    dtype = _codec(method).encode(torch.zeros(0), Key()).dtype
    num_payload = len(message) - 1
    if message.dtype == torch.uint8 and num_payload >= 0 and bool(message[-1]):
        num_payload -= rest.nbytes
    if message.dtype != torch.uint8 or num_payload < 0 or num_payload % dtype.itemsize:
        raise CompressionError("a message of another size", num_bytes=message.nbytes, buffers=rest.nbytes)
    if num_payload < len(message) - 1:
        rest.view(torch.uint8).copy_(message[num_payload:-1])
    return message[:num_payload].clone().view(dtype)
