"""Formats of checkpoints, forged and read: ours, DeepSpeed's, torch's and safetensors."""

from __future__ import annotations

import io
import json
import pickle
import random
import struct
import zipfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.distributed.checkpoint.metadata import Metadata
from typer.testing import CliRunner

from tests.attacks.forging.mutations import damaged_bytes, evil_value, mutated, replaced_file
from torsh_distributed.checkpoint import CheckpointManager
from torsh_distributed.checkpoint.files.block_hashes import record_of
from torsh_distributed.checkpoint.files.manifest import MANIFEST, MARKER, SHARED, TENSORS, marker_for
from torsh_distributed.cli.checkpoint.commands import app
from torsh_distributed.comm.serialization import deserialize, serialize
from torsh_distributed.errors import SerializationError
from torsh_distributed.migrate.deepspeed.checkpoints.conversion import convert_checkpoint, write_weights
from torsh_distributed.migrate.foreign_state import ForeignState, write_foreign_weights
from torsh_distributed.migrate.pytorch.torch_checkpoint import open_torch_checkpoint
from torsh_distributed.plan import CheckpointConfig

STEP = "step-00000001"


def objects() -> dict[str, Any]:
    """What a small training loop saves."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    model(torch.randn(3, 4)).sum().backward()
    optimizer.step()
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 2)
    return {"model": model, "optimizer": optimizer, "schedule": schedule, "values": {"seen": [1, torch.ones(3)]}}


def make_checkpoint(folder: Path, *, compression_level: int = 0) -> None:
    """Our checkpoint at `folder/step-00000001`."""
    config = CheckpointConfig(dir=str(folder), compression_level=compression_level)
    with CheckpointManager(config) as manager:
        manager.save(1, objects())


def make_compressed(folder: Path) -> None:
    """The same, compressed."""
    make_checkpoint(folder, compression_level=1)


def forge_checkpoint(folder: Path, draw: random.Random, private: Path) -> None:
    """Change one file; mostly the manifest and the marker vouch for it, as a forger would let them."""
    step = folder / STEP
    target = step / draw.choice([TENSORS, TENSORS, TENSORS, MANIFEST, MANIFEST, SHARED, "rank-0.state", MARKER])
    manifest = json.loads((step / MANIFEST).read_bytes())
    if draw.random() < 0.1:
        replaced_file(target, draw, private)
        return
    if target.name == MANIFEST:
        (step / MANIFEST).write_text(json.dumps(mutated(manifest, draw, private)))
    elif target.name == TENSORS and draw.random() < 0.9:
        _forge_index(step, draw, private)
    elif target.suffix == ".state" and draw.random() < 0.9:
        _forge_state(target, draw, private)
    else:
        target.write_bytes(damaged_bytes(target.read_bytes(), draw))
    if target.name not in (MANIFEST, MARKER) and draw.random() < 0.95:
        manifest["files"][target.name] = record_of(target.read_bytes()).to_json()
        (step / MANIFEST).write_text(json.dumps(manifest))
    if target.name != MARKER:
        (step / MARKER).write_bytes(marker_for((step / MANIFEST).read_bytes()))


def _forge_index(step: Path, draw: random.Random, private: Path) -> None:
    index = json.loads((step / TENSORS).read_bytes())
    if draw.random() < 0.2:  # nothing else is wrong: what is read is the private file
        index["files"] = [draw.choice(["../../private.txt", str(private)])]
    elif draw.random() < 0.5:
        one = draw.choice(list(index["tensors"].values()))
        one[2] = mutated(one[2], draw, private)
        if draw.random() < 0.3:
            index["files"] = [evil_value(draw, private)]
    else:
        index = mutated(index, draw, private)
    (step / TENSORS).write_text(json.dumps(index))


def _forge_state(path: Path, draw: random.Random, private: Path) -> None:
    forged = mutated(deserialize(path.read_bytes()), draw, private)
    try:
        path.write_bytes(serialize(forged))
    except (SerializationError, ValueError, UnicodeEncodeError):
        path.write_bytes(damaged_bytes(path.read_bytes(), draw))


def read_checkpoint(folder: Path) -> Iterator[Callable[[], object]]:
    """Everything that reads our checkpoint."""
    yield lambda: command("ls", folder)
    yield lambda: command("show", folder)
    yield lambda: command("verify", folder)
    yield lambda: command("diff", folder, folder)
    yield lambda: command("export", folder, folder / "out")
    yield lambda: _load(folder)


def _load(folder: Path) -> None:
    with CheckpointManager(folder) as manager:
        manager.load(objects())


def command(*words: object) -> None:
    """A command of `torsh checkpoint`; raises what it raises."""
    done = CliRunner().invoke(app, [str(word) for word in words])
    if done.exception is not None and (not isinstance(done.exception, SystemExit) or done.exit_code == 2):
        raise done.exception


def make_deepspeed(folder: Path) -> None:
    """What DeepSpeed writes at stage 2 with two data-parallel ranks, by hand."""
    place = folder / "global_step1"
    place.mkdir(parents=True)
    (folder / "latest").write_text("global_step1")
    shapes = [{"a.weight": torch.Size([4, 3]), "a.bias": torch.Size([4])}]
    module = {"a.weight": torch.zeros(4, 3), "a.bias": torch.zeros(4), "mean": torch.ones(2)}
    model = {
        "module": module,
        "buffer_names": ["mean"],
        "param_shapes": shapes,
        "frozen_param_shapes": {"f": torch.Size([2])},
        "frozen_param_fragments": {"f": torch.ones(2)},
        "shared_params": {"b.weight": "a.weight"},
        "ds_config": {"zero_optimization": {"stage": 2}},
        "ds_version": "0.18.0",
        "global_steps": 3,
        "skipped_steps": 0,
        "dp_world_size": 2,
        "lr_scheduler": {"last_epoch": 3},
        "epoch": 4,
    }
    torch.save(model, place / "mp_rank_00_model_states.pt")
    for rank in range(2):
        flat = torch.arange(8.0)
        state = {"state": {0: {"exp_avg": flat.clone(), "exp_avg_sq": flat.clone(), "step": 3}}}
        inner = {
            "zero_stage": 2,
            "partition_count": [2],
            "single_partition_of_fp32_groups": [flat],
            "base_optimizer_state": {**state, "param_groups": [{"lr": 0.1, "params": [0]}]},
            "param_alignment_paddings": [[0, 0]],
        }
        shard = {"optimizer_state_dict": inner, "ds_config": {}}
        torch.save(shard, place / f"zero_pp_rank_{rank}_mp_rank_00_optim_states.pt")


class _Opens:
    """A pickle of it opens a file."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return open, (str(self.path),)


def forge_torch_file(path: Path, draw: random.Random, private: Path) -> None:
    """Change the values in a file of torch.save, the pickle that describes them, or its bytes."""
    how = draw.random()
    if how < 0.7:
        forged = mutated(torch.load(path, weights_only=True), draw, private)
        if draw.random() < 0.1:
            forged = {"module": _Opens(private), "x": forged}
        with _deep(), path.open("wb") as file:
            torch.save(forged, file)
    elif how < 0.85:
        _forge_pickle(path, draw)
    else:
        path.write_bytes(damaged_bytes(path.read_bytes(), draw))


@contextmanager
def _deep() -> Iterator[None]:
    """Values nested too deeply to be written are left as they are."""
    try:
        yield
    except (RecursionError, UnicodeEncodeError, RuntimeError):
        return


def _forge_pickle(path: Path, draw: random.Random) -> None:
    with zipfile.ZipFile(path) as found:
        entries = {name: found.read(name) for name in found.namelist()}
    with zipfile.ZipFile(path, "w") as forged:
        for name, data in entries.items():
            forged.writestr(name, damaged_bytes(data, draw) if name.endswith("data.pkl") else data)


def forge_deepspeed(folder: Path, draw: random.Random, private: Path) -> None:
    """Change one file of a tag, or the name of the newest tag."""
    if draw.random() < 0.15:
        text = evil_value(draw, private)
        (folder / "latest").write_text(str(text)[:4000], errors="replace")
        return
    target = draw.choice(sorted((folder / "global_step1").iterdir()))
    if draw.random() < 0.05:
        target.unlink()
        draw.choice([target.mkdir, lambda: None])()
        return
    forge_torch_file(target, draw, private)


def read_deepspeed(folder: Path) -> Iterator[Callable[[], object]]:
    """Both things that are done with one."""
    yield lambda: write_weights(folder, folder / "weights")
    yield lambda: convert_checkpoint(folder, folder / "ours")


def make_dcp(folder: Path) -> None:
    """A directory of torch.distributed.checkpoint: ours is one, whose index is torch's."""
    make_checkpoint(folder)


def forge_dcp(folder: Path, draw: random.Random, private: Path) -> None:
    """Change the index, which is a pickle, or a file of tensors."""
    index = folder / STEP / ".metadata"
    if draw.random() < 0.6:
        metadata: Metadata = pickle.loads(index.read_bytes())
        for key, where in list(metadata.storage_data.items()):
            if draw.random() < 0.5:
                name = draw.choice(["relative_path", "offset", "length"])
                object.__setattr__(where, name, evil_value(draw, private))
                metadata.storage_data[key] = where
        if draw.random() < 0.3:
            metadata.planner_data = evil_value(draw, private)
        if draw.random() < 0.1:
            metadata.planner_data = _Opens(private)
        with _deep():
            index.write_bytes(pickle.dumps(metadata))
    else:
        target = draw.choice([index, folder / STEP / "__0_0.distcp"])
        target.write_bytes(damaged_bytes(target.read_bytes(), draw))


def make_torch_file(folder: Path) -> None:
    """A file of torch.save with a model and its optimizer."""
    state = objects()
    folder.mkdir(parents=True)
    content = {"model": state["model"].state_dict(), "optimizer": state["optimizer"].state_dict(), "step": 3}
    torch.save(content, folder / "checkpoint.pt")


def forge_torch(folder: Path, draw: random.Random, private: Path) -> None:
    """Change the file."""
    forge_torch_file(folder / "checkpoint.pt", draw, private)


def read_torch(folder: Path) -> Iterator[Callable[[], object]]:
    """Open it and write its weights."""
    source = folder / "checkpoint.pt" if (folder / "checkpoint.pt").exists() else folder / STEP

    def write() -> None:
        saved: ForeignState = open_torch_checkpoint(source)
        write_foreign_weights(saved, folder / "weights")

    yield write


def make_safetensors(folder: Path) -> None:
    """Two safetensors files with an index, as the hub has them."""
    folder.mkdir(parents=True)
    where = {}
    for number in (1, 2):
        name = f"model-{number:05d}-of-00002.safetensors"
        _write_header(folder / name, {f"w{number}": _entry([2, 3], 0), f"b{number}": _entry([3], 24)}, bytes(36))
        where |= {f"w{number}": name, f"b{number}": name}
    index = {"metadata": {"total_size": 72}, "weight_map": where}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))


def _entry(shape: list[int], start: int) -> dict[str, Any]:
    return {"dtype": "F32", "shape": shape, "data_offsets": [start, start + 4 * torch.Size(shape).numel()]}


def _write_header(path: Path, header: Any, data: bytes) -> None:
    text = json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + data)


def forge_safetensors(folder: Path, draw: random.Random, private: Path) -> None:
    """Change the index, a header, or bytes."""
    files = sorted(folder.iterdir())
    target = draw.choice([*files, folder / "model.safetensors.index.json"])
    if draw.random() < 0.2:
        target.write_bytes(damaged_bytes(target.read_bytes(), draw))
    elif target.suffix == ".json":
        target.write_text(json.dumps(mutated(json.loads(target.read_bytes()), draw, private)))
    else:
        data = io.BytesIO(target.read_bytes())
        header = json.loads(data.read(struct.unpack("<Q", data.read(8))[0]))
        _write_header(target, mutated(header, draw, private), data.read())


def read_safetensors(folder: Path) -> Iterator[Callable[[], object]]:
    """Import the directory, or one of its files."""
    yield lambda: command("import", folder, folder / "ours")
    yield lambda: command("import", folder / "model-00001-of-00002.safetensors", folder / "one")
