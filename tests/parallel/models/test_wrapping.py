"""Which modules travel as one piece."""

from __future__ import annotations

import pytest
from torch import nn

from tests.parallel.golden import gpt, mlp, odd
from torsh_distributed.errors import ConfigurationError
from torsh_distributed.parallel.models.wrapping import ignored_modules, pieces_of, repeated_layers
from torsh_distributed.plan import FsdpConfig


class Nested(nn.Module):
    """Two lists of blocks, one of them inside a block, and a list whose members all differ."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.ModuleList(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)) for _ in range(2))
        self.heads = nn.ModuleDict({"a": nn.Linear(4, 2), "b": nn.Embedding(3, 4)})
        self.tail = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4))


def test_repeated_layers_are_found_outermost_first() -> None:
    assert list(repeated_layers(Nested())) == ["encoder.0", "encoder.1", "tail.0", "tail.2"]
    assert list(repeated_layers(gpt())) == ["blocks.0", "blocks.1"]
    assert repeated_layers(nn.Linear(2, 2)) == {}


def test_without_repeated_layers_size_decides() -> None:
    model = nn.Sequential(nn.Linear(40, 40), nn.Embedding(5, 2))
    assert list(pieces_of(model, FsdpConfig())) == ["0"]


def test_by_size_cuts_bottom_up() -> None:
    model = mlp()  # layers of 224, 1056 and 99 parameters
    assert list(pieces_of(model, FsdpConfig(wrap="size"))) == ["2"]
    assert list(pieces_of(model, FsdpConfig(wrap="size", wrap_min_params=200))) == ["0", "2"]
    assert list(pieces_of(model, FsdpConfig(wrap="size", wrap_min_params=10**6))) == []
    nested = pieces_of(Nested(), FsdpConfig(wrap="size", wrap_min_params=30))
    assert list(nested) == ["encoder.0", "encoder.1", "tail"]


def test_none_leaves_the_model_in_one_piece() -> None:
    assert pieces_of(gpt(), FsdpConfig(wrap="none")) == {}


def test_classes_and_patterns_are_matched_part_by_part() -> None:
    assert list(pieces_of(gpt(), FsdpConfig(wrap_classes=("Block",)))) == ["blocks.0", "blocks.1"]
    assert list(pieces_of(gpt(), FsdpConfig(wrap_names=("blocks.*",)))) == ["blocks.0", "blocks.1"]
    both = pieces_of(gpt(), FsdpConfig(wrap_classes=("Embedding",), wrap_names=("blocks.1.feed_*",)))
    assert list(both) == ["token", "position", "blocks.1.feed_forward_norm", "blocks.1.feed_forward"]


def test_what_matches_nothing_is_refused_with_what_there_is() -> None:
    with pytest.raises(ConfigurationError, match=r"fsdp.wrap_classes: no module is a Blok(.|\n)*did you mean Block\?"):
        pieces_of(gpt(), FsdpConfig(wrap_classes=("Blok",)))
    with pytest.raises(
        ConfigurationError, match=r"fsdp.wrap_names: no module's name matches 'q.\*'(.|\n)*the model has"
    ):
        pieces_of(gpt(), FsdpConfig(wrap_names=("q.*",)))
    with pytest.raises(ConfigurationError, match=r"fsdp.ignored_modules: no module's name matches 'hed'(.|\n)*head"):
        pieces_of(gpt(), FsdpConfig(ignored_modules=("hed",)))


def test_ignored_modules_are_no_pieces_with_all_that_is_in_them() -> None:
    config = FsdpConfig(ignored_modules=("blocks.0",), wrap="size", wrap_min_params=1)
    assert not any(name.startswith("blocks.0") for name in pieces_of(gpt(), config))
    assert "blocks.0.feed_forward.2" in ignored_modules(gpt(), ["blocks.0"])


def test_a_module_that_shares_a_parameter_outside_itself_is_no_piece() -> None:
    config = FsdpConfig(wrap_classes=("Embedding", "Linear"))
    pieces = pieces_of(odd(), config)
    assert "table" not in pieces
    assert "head" not in pieces
    assert {"layers.0", "narrow"} <= set(pieces)
    inside = nn.ModuleDict({"both": odd(), "other": nn.Linear(2, 2)})
    assert "both" in pieces_of(inside, FsdpConfig(wrap_names=("both",))), "the piece around both sides of a tie is one"


def test_modules_without_parameters_are_no_pieces() -> None:
    model = nn.Sequential(nn.Dropout(), nn.Dropout(), nn.Linear(2, 2))
    assert list(pieces_of(model, FsdpConfig(wrap_classes=("Dropout", "Linear")))) == ["2"]


def test_a_function_may_choose() -> None:
    config = FsdpConfig(wrap_classes=("Block",), ignored_modules=("head",))
    chosen = pieces_of(gpt(), config, lambda name, module: name.endswith("norm") or isinstance(module, nn.Linear))
    assert "blocks.0.attention_norm" in chosen
    assert "blocks.1.projection" in chosen
    assert "head" not in chosen, "what is ignored is no piece"
    assert "blocks.0" not in chosen


def test_a_list_of_modules_is_no_piece() -> None:
    assert "encoder" not in pieces_of(Nested(), FsdpConfig(), lambda name, module: True)
