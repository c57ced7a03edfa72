"""The codecs, one file each, and the table that finds them by the name a plan uses."""

from torsh_distributed.compress.codecs.registry import codec_names, make_codec

__all__ = ["codec_names", "make_codec"]
