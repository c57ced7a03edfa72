"""Checkpoints of plain torch: training goes on from them with the losses that torch itself would have had."""

from __future__ import annotations

import io
import pickle
import shutil
import warnings
from enum import Enum
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.metadata import _MEM_FORMAT_ENCODING, TensorProperties
from torch.distributed.checkpoint.state_dict import get_state_dict
from torch.distributed.fsdp import FullStateDictConfig, FullyShardedDataParallel, StateDictType
from torch.nn.parallel import DistributedDataParallel
from torch.optim import AdamW

from tests.bed.world import World
from torsh_distributed.errors import CheckpointError
from torsh_distributed.migrate.pytorch import convert_torch_checkpoint, load_torch_checkpoint, open_torch_checkpoint
from torsh_distributed.plan import Plan
from torsh_distributed.train import parallelize


class Net(nn.Module):
    """With buffers between the parameters."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.first = nn.Linear(4, 6)
        self.norm = nn.BatchNorm1d(6, momentum=0.0)
        self.last = nn.Linear(6, 2)

    def forward(self, inputs: Tensor) -> Tensor:
        return self.last(torch.tanh(self.norm(self.first(inputs))))


def batch(step: int) -> tuple[Tensor, Tensor]:
    inputs = torch.randn(6, 4, generator=torch.Generator().manual_seed(10 * step + dist.get_rank()))
    return inputs, inputs[:, :2]


def trained(model: nn.Module, optimizer: torch.optim.Optimizer, steps: range) -> list[float]:
    """Mean losses over the ranks, by torch alone."""
    losses = []
    for step in steps:
        inputs, targets = batch(step)
        loss = nn.functional.mse_loss(model(inputs), targets)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        mean = loss.detach().clone()
        dist.all_reduce(mean)
        losses.append(float(mean) / dist.get_world_size())
    return losses


def save_all(folder: str) -> list[float]:
    """With DDP to a file, the same state from FSDP1 (full) to a file and in shards; then the losses of DDP."""
    place = Path(folder)
    ddp = DistributedDataParallel(Net(), broadcast_buffers=False)
    optimizer = AdamW(ddp.parameters(), lr=0.05)
    trained(ddp, optimizer, range(3))
    state = {"state_dict": ddp.state_dict(), "optimizer": optimizer.state_dict(), "epoch": 4, "note": "plain"}
    if dist.get_rank() == 0:
        torch.save(state, place / "ddp.pt")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch deprecates FSDP1, which is what comes over
        inner = Net()
        fsdp = FullyShardedDataParallel(inner, device_id=torch.device("cpu"), use_orig_params=True)
        other = AdamW(fsdp.parameters(), lr=0.05)
        trained(fsdp, other, range(3))
        with FullyShardedDataParallel.state_dict_type(fsdp, StateDictType.FULL_STATE_DICT, FullStateDictConfig()):
            # In FSDP1's layout, by names, with the moments of DDP: its own gather of exp_avg is wrong on CPUs (2.13).
            layout = FullyShardedDataParallel.optim_state_dict(fsdp, other)
            names = layout["param_groups"][0]["params"]
            moments = {name: optimizer.state_dict()["state"][number] for number, name in enumerate(names)}
            full = {"model": fsdp.state_dict(), "optim": {**layout, "state": moments}}
        if dist.get_rank() == 0:
            torch.save(full, place / "fsdp.pt")
        model_state, optimizer_state = get_state_dict(fsdp, other)
        dcp.save({"model": model_state, "optimizer": optimizer_state, "step": 3}, checkpoint_id=place / "dcp")
    return trained(ddp, optimizer, range(3, 6))


def go_on(folder: str) -> dict[str, list[float]]:
    losses = {}
    sections: dict[str, dict[str, Any]] = {"replicas": {"mesh": {"dp": 2}}, "shards": {"mesh": {"dp": 1, "shard": 2}}}
    for source in ("ddp.pt", "fsdp.pt", "dcp", "ours"):
        for label, section in sections.items():
            if (source, label) in (("fsdp.pt", "replicas"), ("ours", "replicas")):
                continue
            model = Net()
            with torch.no_grad():
                for param in model.parameters():
                    param.zero_()  # what is right afterwards was loaded
            plan = Plan.from_dict({**section, "ddp": {"broadcast_buffers": False}})
            engine = parallelize(model, AdamW(model.parameters(), lr=1.0), plan, loss_fn=nn.functional.mse_loss)
            if source == "ours":
                engine.load(f"{folder}/ours")
            else:
                found = load_torch_checkpoint(engine, f"{folder}/{source}")
                assert source != "ddp.pt" or found == {"epoch": 4, "note": "plain"}
            assert engine.num_steps == 3
            losses[f"{source} into {label}"] = [engine.step(batch(step)) for step in range(3, 6)]
    return losses


def test_training_goes_on_from_ddp_and_fsdp_as_it_would_have_with_torch(world: World, tmp_path: Path) -> None:
    expected = world.run(save_all, str(tmp_path), num_ranks=2, timeout_s=60)[0]
    convert_torch_checkpoint(tmp_path / "ddp.pt", tmp_path / "ours")
    for label, losses in world.run(go_on, str(tmp_path), num_ranks=2, timeout_s=60)[0].items():
        assert losses == pytest.approx(expected, abs=1e-5), label
    _refuse_hostile_indices(tmp_path)


def _refuse_hostile_indices(folder: Path) -> None:
    index = folder / "dcp" / ".metadata"
    good = index.read_bytes()
    shard = next((folder / "dcp").glob("*.distcp"))
    index.write_bytes(good[:50])
    with pytest.raises(CheckpointError, match="is damaged"):
        open_torch_checkpoint(folder / "dcp")
    index.write_bytes(pickle.dumps(shutil.rmtree))
    with pytest.raises(CheckpointError, match=r"names what an index does not hold.*shutil\.rmtree"):
        open_torch_checkpoint(folder / "dcp")
    index.write_bytes(good)
    shard.write_bytes(b"")
    with pytest.raises(CheckpointError, match="cannot be read from"):
        open_torch_checkpoint(folder / "dcp").whole("model.first.weight")


def adam_of(model: nn.Module) -> dict[str, Any]:
    optimizer = AdamW(model.parameters(), lr=0.1)
    for param in model.parameters():
        param.grad = torch.ones_like(param)
    optimizer.step()
    return optimizer.state_dict()


class Ambiguous(nn.Module):
    """A buffer that looks like the parameter after it."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(3))
        self.register_buffer("mean", torch.zeros(3))
        self.shift = nn.Parameter(torch.ones(3))


class _OfPython3112(pickle.Pickler):
    """Writes members of enumerations as Python 3.11.2 does, which is Debian 12's."""

    def reducer_override(self, obj: Any) -> Any:
        return (getattr, (type(obj), obj.name)) if isinstance(obj, Enum) else NotImplemented


def _as_of_python_3112(value: Any) -> bytes:
    file = io.BytesIO()
    _OfPython3112(file).dump(value)
    return file.getvalue()


def test_an_index_written_by_an_older_python_is_read_and_names_nothing_else(tmp_path: Path) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch says that one process saves
        dcp.save({"model": {"weight": torch.arange(6.0)}}, checkpoint_id=tmp_path, no_dist=True)
    index = tmp_path / ".metadata"
    index.write_bytes(_as_of_python_3112(pickle.loads(index.read_bytes())))
    assert b"getattr" in index.read_bytes()
    assert torch.equal(open_torch_checkpoint(tmp_path).whole("model.weight"), torch.arange(6.0))
    for target, name in ((torch.Size, "__subclasses__"), (TensorProperties, "__init__"), (_MEM_FORMAT_ENCODING, "mro")):
        index.write_bytes(pickle.dumps(_Asks(target, name)))
        with pytest.raises(CheckpointError, match=r"names what an index does not hold.*getattr"):
            open_torch_checkpoint(tmp_path)


def test_an_index_written_by_python_3_13_is_read(tmp_path: Path) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch says that one process saves
        dcp.save({"model": {"weight": torch.arange(6.0)}}, checkpoint_id=tmp_path, no_dist=True)
    index = tmp_path / ".metadata"
    written = pickle.loads(index.read_bytes())
    written.storage_meta.checkpoint_id = tmp_path
    text = pickle.dumps(written, protocol=2, fix_imports=False)  # names stand in lines
    index.write_bytes(text.replace(b"cpathlib\n", b"cpathlib._local\n"))
    assert b"pathlib._local" in index.read_bytes()
    assert torch.equal(open_torch_checkpoint(tmp_path).whole("model.weight"), torch.arange(6.0))


class _Asks:
    """In a pickle: `getattr(target, name)`."""

    def __init__(self, target: Any, name: str) -> None:
        self.target, self.name = target, name

    def __reduce__(self) -> Any:
        return getattr, (self.target, self.name)


def test_names_that_the_order_does_not_give_are_an_error(tmp_path: Path) -> None:
    model = Ambiguous()
    torch.save({"model": model.state_dict(), "optimizer": adam_of(model)}, tmp_path / "a.pt")
    with pytest.raises(CheckpointError, match="their order does not say which"):
        open_torch_checkpoint(tmp_path / "a.pt")
    plain = nn.Sequential(nn.Linear(3, 2), nn.BatchNorm1d(2), nn.Linear(2, 5))
    torch.save({"net": plain.state_dict(), "optimizer": adam_of(plain)}, tmp_path / "b.pt")
    found = open_torch_checkpoint(tmp_path / "b.pt")
    assert found.tensors["optimizer.state.2.weight.exp_avg"].shape == (5, 2)
    assert found.values["optimizer"]["param_groups"][0]["params"][-1] == "2.bias"


def test_parts_are_told_apart_or_asked_for(tmp_path: Path) -> None:
    model = nn.Linear(2, 1)
    torch.save({"a": model.state_dict(), "b": model.state_dict()}, tmp_path / "two.pt")
    with pytest.raises(CheckpointError, match="several parts that look like a model"):
        open_torch_checkpoint(tmp_path / "two.pt")
    assert open_torch_checkpoint(tmp_path / "two.pt", model_key="b").weights == ["weight", "bias"]
    torch.save({"epoch": 1}, tmp_path / "none.pt")
    with pytest.raises(CheckpointError, match="no parts that look like a model"):
        open_torch_checkpoint(tmp_path / "none.pt")
    torch.save(model.state_dict(), tmp_path / "bare.pt")
    with pytest.raises(CheckpointError, match="has no optimizer state"):
        convert_torch_checkpoint(tmp_path / "bare.pt", tmp_path / "out")
    flat = {"_fsdp_wrapped_module._flat_param": torch.zeros(4)}
    torch.save(flat, tmp_path / "flat.pt")
    with pytest.raises(CheckpointError, match="flat parameters"):
        open_torch_checkpoint(tmp_path / "flat.pt")
    torch.save([1], tmp_path / "list.pt")
    with pytest.raises(CheckpointError, match="holds a list"):
        open_torch_checkpoint(tmp_path / "list.pt")
