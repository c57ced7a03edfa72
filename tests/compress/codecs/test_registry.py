"""From the words of a plan to a codec."""

from __future__ import annotations

import pytest

from torsh_distributed.compress.codecs import codec_names, make_codec
from torsh_distributed.compress.codecs.dense.bimodal import BimodalCodec
from torsh_distributed.compress.codecs.dense.rounding import Int8Codec, NbitCodec
from torsh_distributed.errors import ConfigurationError, InvalidArgument
from torsh_distributed.plan.sections.compress import METHODS


def test_every_method_makes_a_codec_of_its_name() -> None:
    for name in codec_names():
        assert make_codec(name).name == name


def test_only_the_choice_among_them_is_no_codec() -> None:
    assert set(METHODS) - set(codec_names()) <= {"auto", "layerwise"}


def test_the_number_reaches_the_codec() -> None:
    block, bits, entries = make_codec("int8:64"), make_codec("nbit:3"), make_codec("bimodal:7")
    assert isinstance(block, Int8Codec)
    assert isinstance(bits, NbitCodec)
    assert isinstance(entries, BimodalCodec)
    assert (block.block, bits.bits, entries.num_entries) == (64, 3, 7)


def test_what_is_no_method_is_refused_with_a_proposal() -> None:
    with pytest.raises(ConfigurationError, match="'int9' is unknown") as caught:
        make_codec("int9")
    assert "int8" in str(caught.value.hint)
    with pytest.raises(ConfigurationError, match="from 1 to 8"):
        make_codec("nbit:9")
    with pytest.raises(InvalidArgument, match="chooses among codecs"):
        make_codec("auto")
