"""Gradients in fewer bytes: codecs, what makes up for their errors, and the collectives that carry them."""

from torsh_distributed.compress.adaptive import AdaptationStrategy, AdaptiveCompression, configure_compression
from torsh_distributed.compress.codecs import codec_names, make_codec
from torsh_distributed.compress.codecs.base import Averaged, Codec, Key
from torsh_distributed.compress.compression_stats import CompressionStats
from torsh_distributed.compress.compressor import GradientCompressor, compressed_all_reduce
from torsh_distributed.compress.messages.compressed_gradient import CompressedGradient

__all__ = [
    "AdaptationStrategy",
    "AdaptiveCompression",
    "Averaged",
    "Codec",
    "CompressedGradient",
    "CompressionStats",
    "GradientCompressor",
    "Key",
    "codec_names",
    "compressed_all_reduce",
    "configure_compression",
    "make_codec",
]
