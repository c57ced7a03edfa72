"""What a model consists of: as it declares itself, as its author writes, as its structure shows."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest
import torch
from torch import nn

import torsh_distributed
from tests.parallel.golden import gpt
from tests.parallel.models.zoo import SPECIMENS
from torsh_distributed.errors import InvalidArgument
from torsh_distributed.parallel.models.anatomy import anatomy_of

needs_transformers = pytest.mark.needs_library("transformers")
needs_torchvision = pytest.mark.needs_torchvision


@needs_transformers
def test_a_declared_model_speaks_for_itself() -> None:
    with torch.device("meta"):
        found = anatomy_of(SPECIMENS["Llama"].build())
    assert found.source == "declared by transformers"
    assert (found.base, found.layer_lists, found.layers[1]) == ("model", ("model.layers",), "model.layers.1")
    assert (found.embeddings, found.norms, found.head) == (("model.embed_tokens",), ("model.norm",), "lm_head")
    assert found.rotary == ("model.rotary_emb",)
    assert found.attention[0] == "model.layers.0.self_attn"
    assert found.mlp[0] == "model.layers.0.mlp"
    assert found.tensor_plan["model.layers.*.self_attn.q_proj"] == "colwise"
    assert found.flows["model.layers"] == (("hidden_states", "attention_mask"), ("hidden_states",))
    assert not found.is_encoder_decoder


@needs_transformers
def test_experts_ties_and_encoders_are_known() -> None:
    with torch.device("meta"):
        mixtral, two, t5 = (anatomy_of(SPECIMENS[name].build()) for name in ("Mixtral", "GPT-2", "T5"))
    assert mixtral.experts[0] == "model.layers.0.mlp.experts"
    assert two.tied == (("transformer.wte.weight", "lm_head.weight"),)
    assert (two.layer_lists, two.norms) == (("transformer.h",), ("transformer.ln_f",))
    assert t5.is_encoder_decoder
    assert t5.layer_lists == ("encoder.block", "decoder.block")


@needs_transformers
def test_a_model_without_a_plan_gets_one_from_its_layers() -> None:
    with torch.device("meta"):
        bert, bloom = (anatomy_of(SPECIMENS[name].build()).tensor_plan for name in ("BERT", "BLOOM"))
    assert bert["bert.encoder.layer.*.attention.self.query"] == "colwise"
    assert bert["bert.encoder.layer.*.attention.output.dense"] == "rowwise"
    assert bert["bert.encoder.layer.*.intermediate.dense"] == "colwise"
    assert bert["bert.encoder.layer.*.output.dense"] == "rowwise"
    assert bloom["transformer.h.*.self_attention.query_key_value"] == "colwise_gather_output"


@needs_torchvision
def test_torchvision_models_are_known_by_their_structure() -> None:
    resnet, vit = (anatomy_of(SPECIMENS[name].build()) for name in ("ResNet-18", "torchvision ViT"))
    assert resnet.layer_lists == ("net.layer1", "net.layer2", "net.layer3", "net.layer4")
    assert resnet.head == "net.fc"
    assert vit.layer_lists == ("net.encoder.layers",)
    assert vit.head == "net.heads.head"


def test_a_model_of_ones_own_is_known_by_its_structure() -> None:
    found = anatomy_of(gpt())
    assert (found.base, found.layers, found.source) == ("", ("blocks.0", "blocks.1"), "found in the structure")
    assert (found.embeddings, found.norms, found.head) == (("token", "position"), ("norm",), "head")


class Described(nn.Module):
    """Blocks that no rule would find, named by the author."""

    def __init__(self, said: object) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(2, 2), nn.Linear(2, 2)
        self.torsh_anatomy = said


def test_what_the_author_writes_wins_and_is_checked() -> None:
    found = anatomy_of(Described({"layers": ["first", "second"], "tensor_plan": {"first": "colwise"}}))
    assert (found.layers, found.source) == (("first", "second"), "declared by the user")
    with pytest.raises(InvalidArgument, match=r"layers names 'frist'(.|\n)*did you mean first\?"):
        anatomy_of(Described({"layers": ["frist"]}))
    with pytest.raises(InvalidArgument, match=r"no part 'layer'(.|\n)*did you mean layers\?"):
        anatomy_of(Described({"layer": ["first"]}))


def test_a_model_without_blocks_is_refused_with_what_to_write() -> None:
    with pytest.raises(InvalidArgument, match=r"Bilinear has no blocks that repeat(.|\n)*torsh_anatomy\(\)"):
        anatomy_of(nn.Bilinear(2, 2, 2))


def test_transformers_is_imported_by_what_needs_it_alone() -> None:
    """In functions: training other models needs none of these libraries."""
    source = Path(torsh_distributed.__file__).parent
    optional = {"transformers", "peft", "accelerate", "torchvision", "torchao", "safetensors"}
    for file in [*source.glob("parallel/**/*.py"), *source.glob("train/**/*.py")]:
        for node in ast.parse(file.read_text()).body:
            names = [one.name for one in node.names] if isinstance(node, ast.Import) else []
            names += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            assert not optional & {name.partition(".")[0] for name in names}, file
