"""The codecs: `base` is the interface, `registry` finds them by the plan's name, `auto` chooses among them."""

from torsh_distributed.compress.codecs.registry import codec_names, make_codec

__all__ = ["codec_names", "make_codec"]
