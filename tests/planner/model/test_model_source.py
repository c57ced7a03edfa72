"""Models by what a user types: a function, a config or a kind of transformers, without weights and memory."""

from __future__ import annotations

import json
import time
from pathlib import Path

import pytest

from torsh_distributed.errors import ConfigurationError
from torsh_distributed.planner.model.model_source import find_model
from torsh_distributed.planner.model.profiling import profile_model

SCRIPT = """
import torch
from torch import nn
from torsh_distributed.train.demos.gpt import CharGPT


def build():
    return CharGPT(65)


def with_example():
    return CharGPT(65), (torch.zeros(1, 16, dtype=torch.int64),)




class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        self.rates = [rate.item() for rate in torch.linspace(0, 0.1, 3)]
        self.table, self.head = nn.Embedding(100, 16), nn.Linear(16, 100, bias=False)
        self.head.weight = self.table.weight

    def forward(self, ids):
        return self.head(self.table(ids))


def reads_values():
    return Tied()


def on_a_gpu():
    return CharGPT(65).to("meta").to("cpu")


def compiled():
    return torch.compile(CharGPT(65))


def fails():
    raise RuntimeError("no file weights.pt")


def of_size(size):
    return nn.Linear(size, size)


SIZE = 3
"""

ENDS = "raise SystemExit(2)"


@pytest.fixture
def script(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """A module of the user's."""
    (tmp_path / "my_planned_script.py").write_text(SCRIPT)
    (tmp_path / "my_ending_script.py").write_text(ENDS)
    monkeypatch.chdir(tmp_path)
    return "my_planned_script"


def test_a_function_builds_a_model_without_memory(script: str) -> None:
    assert all(param.is_meta for param in find_model(f"{script}:build").model.parameters())


def test_a_function_may_give_an_example(script: str) -> None:
    found = find_model(f"{script}:with_example")
    assert profile_model(found.model, example=found.example).tokens_per_sample == 16


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # what torch's compiler imports
def test_what_compile_returned_is_the_model_in_it(script: str) -> None:
    assert type(find_model(f"{script}:compiled").model).__name__ == "CharGPT"


def test_a_model_that_reads_values_while_it_is_built_gets_no_memory_either(script: str) -> None:
    model = find_model(f"{script}:reads_values").model
    assert all(param.is_meta for param in model.parameters())
    assert model.rates == pytest.approx([0.0, 0.05, 0.1])
    assert model.head.weight is model.table.weight
    assert profile_model(model).all_params.numel() == 1600


@pytest.mark.parametrize(
    ("name", "message"),
    [
        (":build", "not of the form module:function"),
        ("no_such_module:build", "No module named 'no_such_module'"),
        ("my_planned_script.py:build", r"a module is named without \.py: my_planned_script:"),
        ("my_planned_script.py", "my_planned_script.py is a script(.|\n)*such as my_planned_script:build_model"),
        ("my_planned_script.build", "my_planned_script.py is a script(.|\n)*such as my_planned_script:build$"),
        ("my_planned_script:bulid", r"has no function bulid(.|\n)*did you mean build\?"),
        ("builtins:dict", "it returns a dict, not a model"),
        ("my_planned_script:xyz", r"has no function xyz(.|\n)*it has .*build, with_example"),
        ("my_planned_script:SIZE", "SIZE of my_planned_script is of type int, not a function"),
        ("my_planned_script:fails", r"RuntimeError: no file weights\.pt, in line \d+ of my_planned_script\.py"),
        ("my_planned_script:of_size", "TypeError: of_size\\(\\) missing 1 required positional argument"),
        ("my_planned_script:on_a_gpu", "Cannot copy out of meta tensor"),
        ("my_ending_script:build", "cannot be imported: SystemExit: 2"),
    ],
)
def test_a_wrong_function_is_refused(script: str, name: str, message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        find_model(name)


@pytest.mark.needs_library("transformers")
def test_a_config_of_transformers_is_a_model_without_weights(tmp_path: Path) -> None:
    config = {"model_type": "llama", "hidden_size": 64, "num_hidden_layers": 3, "num_attention_heads": 4}
    config |= {"intermediate_size": 128, "vocab_size": 100, "num_key_value_heads": 2}
    (tmp_path / "config.json").write_text(json.dumps(config))
    found = find_model(str(tmp_path))
    profile = profile_model(found.model, sequence=32)
    assert (profile.num_blocks, profile.loss_note) == (3, "the model's own loss")


@pytest.mark.needs_library("transformers")
def test_a_kind_that_does_not_exist_gets_the_nearest(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a network at once: the hub's client would ask again five times."""
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "ENDPOINT", "https://hub.invalid")
    monkeypatch.setattr(time, "sleep", lambda _: pytest.fail("the hub is asked again"))
    with pytest.raises(ConfigurationError, match=r"lama names no model(.|\n)*did you mean llama"):
        find_model("lama")


@pytest.mark.needs_library("transformers")
@pytest.mark.parametrize(
    ("config", "kind"),
    [
        (
            {"model_type": "bart", "d_model": 32, "encoder_layers": 1, "decoder_layers": 1},
            "BartForConditionalGeneration",
        ),
        ({"model_type": "bert", "hidden_size": 48, "num_hidden_layers": 1}, "BertForMaskedLM"),
        ({"model_type": "opt", "hidden_size": 48, "num_hidden_layers": 1}, "OPTForCausalLM"),
    ],
)
def test_a_config_gets_the_head_that_it_is_trained_with(tmp_path: Path, config: dict[str, object], kind: str) -> None:
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert type(find_model(str(tmp_path)).model).__name__ == kind


@pytest.mark.needs_library("transformers")
def test_a_config_that_its_model_cannot_be_built_from_is_refused_in_words(tmp_path: Path) -> None:
    config = {"model_type": "llama", "hidden_size": 64, "num_attention_heads": 0}
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(ConfigurationError, match="builds no model: ZeroDivisionError"):
        find_model(str(tmp_path))
