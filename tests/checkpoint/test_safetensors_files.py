"""A model in several safetensors files with an index, as from_pretrained reads them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from typer.testing import CliRunner

from tests.bed.heavy_imports import GENERATION
from tests.bed.world import World
from torsh_distributed.checkpoint import CheckpointManager
from torsh_distributed.checkpoint.loading.restoring import open_newest
from torsh_distributed.checkpoint.safetensors_files import export
from torsh_distributed.cli.checkpoint.commands import app
from torsh_distributed.parallel.weights.tensor_files import INDEX
from torsh_distributed.plan import Plan
from torsh_distributed.train import parallelize


def test_shards_have_an_index_and_every_dtype_survives(tmp_path: Path) -> None:
    model = torch.nn.Module()
    for number, dtype in enumerate((torch.float32, torch.bfloat16, torch.int64, torch.bool, torch.float16)):
        model.register_buffer(f"b{number}", torch.arange(24).view(2, 3, 4).to(dtype))
    model.register_buffer("scalar", torch.tensor(3.0))
    with CheckpointManager(tmp_path / "c") as manager:
        manager.save(1, {"model": model})
    seen: list[int] = []
    files = export(open_newest(tmp_path / "c"), tmp_path / "out", shard_bytes=150, progress=seen.append)
    index = json.loads((tmp_path / "out" / INDEX).read_text())
    assert files[0].name == f"model-00001-of-{len(files):05d}.safetensors"
    assert len(files) > 2
    assert index["metadata"]["total_size"] == sum(seen)
    for name, value in model.state_dict().items():
        found = load_file(tmp_path / "out" / index["weight_map"][name])[name]
        assert found.dtype == value.dtype
        assert torch.equal(found, value)


def out_and_in(tmp_path: Path) -> None:
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes = {"vocab_size": 2048, "hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 2}
    config = LlamaConfig(**sizes, num_attention_heads=4, num_key_value_heads=2, tie_word_embeddings=True)
    torch.manual_seed(0)
    model = LlamaForCausalLM(config)
    engine = parallelize(model, torch.optim.AdamW(model.parameters(), lr=0.1), Plan())
    ids = torch.arange(24).view(2, 12) % 64
    engine.step({"input_ids": ids, "labels": ids})
    engine.save(tmp_path / "c")
    engine.checkpoints.close()
    out = tmp_path / "out"
    done = CliRunner().invoke(app, ["export", str(tmp_path / "c"), str(out), "--safetensors", "--shard-gb", "0.001"])
    assert done.exit_code == 0, done.output
    assert len(list(out.glob("model-*.safetensors"))) > 1
    assert "lm_head.weight" not in json.loads((out / INDEX).read_text())["weight_map"]
    loaded, report = LlamaForCausalLM.from_pretrained(out, output_loading_info=True)
    assert not report["missing_keys"]
    assert not report["unexpected_keys"]
    assert loaded.config.num_key_value_heads == 2
    with torch.no_grad():
        expected = engine.unwrapped.eval()(ids).logits
        assert torch.equal(loaded.eval()(ids).logits, expected)

    loaded.save_pretrained(tmp_path / "hf", max_shard_size="500KB")
    assert len(list((tmp_path / "hf").glob("*.safetensors"))) > 1
    done = CliRunner().invoke(app, ["import", str(tmp_path / "hf"), str(tmp_path / "in")])
    assert done.exit_code == 0, done.output
    torch.manual_seed(1)
    other = LlamaForCausalLM(config)
    fresh = parallelize(other, torch.optim.AdamW(other.parameters(), lr=0.1), Plan())
    fresh.load(tmp_path / "in", model_only=True)
    with torch.no_grad():
        assert torch.equal(fresh.unwrapped.eval()(ids).logits, expected)


@pytest.mark.needs_library("transformers")
def test_from_pretrained_reads_the_export_and_its_files_come_in_again(world: World, tmp_path: Path) -> None:
    """A tied Llama: the second name of a tensor is left out of the files, and found again under the first."""
    world.run(out_and_in, tmp_path, num_ranks=1, timeout_s=60, imports=GENERATION)
