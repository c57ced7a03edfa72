"""A model on meta gets the stored values on every axis, and a rank reads what it holds and no more."""

from __future__ import annotations

import functools
import os
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from typing_extensions import override

from tests.bed.world import World
from tests.parallel.weights.checkpoints import gpt, on_meta, write_file, write_folder
from torsh_distributed.comm.shared_memory.memory_file import MemoryFile
from torsh_distributed.errors import ConfigurationError, InvalidArgument, TorshError
from torsh_distributed.parallel.weights import reading
from torsh_distributed.plan import Plan
from torsh_distributed.train import Engine, parallelize
from torsh_distributed.train.demos.gpt import next_character_loss

SGD = functools.partial(torch.optim.SGD, lr=0.1)
PLANS: dict[str, dict[str, Any]] = {
    "dp": {"dp": 2},
    "shard": {"dp": 1, "shard": 2, "fsdp": {"strategy": "full_shard"}},
    "zero1": {"dp": 1, "shard": 2, "fsdp": {"strategy": "shard_optimizer"}},
    "tp": {"dp": 1, "tp": 2},
    "pp": {"dp": 1, "pp": 2, "pipeline": {"num_microbatches": 2}},
}


SHARDED: dict[str, dict[str, Any]] = {
    "cp": {"dp": 1, "shard": 2, "cp": 2},
    "tp": {"dp": 1, "shard": 2, "tp": 2},
}


def count_reads(counts: list[int]) -> Any:
    read = os.preadv

    def counted(file: int, buffers: Any, offset: int) -> int:
        done = read(file, buffers, offset)
        counts.append(done)
        return done

    return counted


def load(plan: dict[str, Any], folder: Path) -> tuple[Engine, int]:
    counts: list[int] = []
    reading.os.preadv, before = count_reads(counts), os.preadv
    try:
        engine = parallelize(on_meta(), SGD, Plan(**plan), loss_fn=next_character_loss, weights=folder)
    finally:
        reading.os.preadv = before
    return engine, sum(counts)


def losses(engine: Engine) -> list[float]:
    torch.manual_seed(7)
    ids = torch.randint(29, (3, 8, 17))
    rank, degree = engine.strategy.data_rank, engine.strategy.data_degree
    return [engine.step((part[rank::degree, :-1], part[rank::degree, 1:])) for part in ids]


def on_every_axis(folder: Path, plans: dict[str, dict[str, Any]]) -> dict[str, tuple[int, list[float]]]:
    wanted = gpt().state_dict()
    found = {}
    for name, plan in plans.items():
        engine, num_bytes = load(plan, folder)
        state = engine.state_dict()["model"]
        for key, value in wanted.items():
            torch.testing.assert_close(state[key], value, rtol=0, atol=0, msg=f"{name}: {key}")
        found[name] = (num_bytes, losses(engine))
    return found


def alone() -> list[float]:
    model = gpt()
    optimizer = SGD(model.parameters())
    torch.manual_seed(7)
    out = []
    for part in torch.randint(29, (3, 8, 17)):
        loss = next_character_loss(model(part[:, :-1]), part[:, 1:])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        out.append(loss.item())
    return out


def test_every_axis_gets_the_stored_values_and_reads_its_part(world: World, tmp_path: Path) -> None:
    write_folder(tmp_path, gpt().state_dict(), num_files=3)
    total = sum(value.nbytes for value in gpt().state_dict().values())
    results = world.run(on_every_axis, tmp_path, PLANS)
    wanted = alone()
    for rank, found in enumerate(results):
        for name, (num_bytes, got) in found.items():
            assert got == pytest.approx(wanted, abs=1e-4), name
            if name in ("dp", "zero1"):
                assert num_bytes == (total if rank == 0 else 0), "one rank reads, the others get it from there"
    for name in ("shard", "pp"):
        read = [found[name][0] for found in results]
        assert sum(read) == total, "every byte once"
        assert max(read) < 0.65 * total
    assert max(found["tp"][0] for found in results) < 0.75 * total, "and columns from mapped pages"


def test_shards_in_shared_memory_are_written_through_its_file(world: World, tmp_path: Path) -> None:
    write_folder(tmp_path, gpt().state_dict(), num_files=3)
    for written, losses_of_rank in world.run(written_through_a_file, tmp_path, backend="torsh"):
        assert written > 0
        assert losses_of_rank == pytest.approx(alone(), abs=1e-4)


def written_through_a_file(folder: Path) -> tuple[int, list[float]]:
    counts: list[int] = []
    write = MemoryFile.write

    def counted(self: MemoryFile, data: memoryview, place: int) -> None:
        counts.append(len(data))
        write(self, data, place)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(MemoryFile, "write", counted)
        found = on_every_axis(folder, {"shard": PLANS["shard"]})
    return sum(counts), found["shard"][1]


@pytest.mark.matrix
def test_shards_of_a_split_model_read_their_part(world: World, tmp_path: Path) -> None:
    """Beside `cp` every rank needs all of the model, and beside `tp` a piece of it: but as shards."""
    write_folder(tmp_path, gpt().state_dict(), num_files=3)
    total = sum(value.nbytes for value in gpt().state_dict().values())
    wanted = alone()
    for found in world.run(on_every_axis, tmp_path, SHARDED, num_ranks=4, timeout_s=60):
        for name, (num_bytes, got) in found.items():
            assert got == pytest.approx(wanted, abs=1e-4), name
            assert num_bytes < 0.65 * total, name


class Tabled(nn.Module):
    """Computes a table when it is built, which no checkpoint holds; shares a weight; counts in an integer."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("table", torch.arange(8.0), persistent=False)
        self.register_buffer("count", torch.tensor(5))
        self.first = nn.Linear(8, 8, bias=False)
        self.second = nn.Linear(8, 8)
        self.second.weight = self.first.weight

    @override
    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.second(self.first(x) + self.table).square().mean()
        return out


class Resettable(Tabled):
    def reset_parameters(self) -> None:
        self.table.copy_(torch.arange(8.0))


def with_buffers(file: Path) -> tuple[str, list[float]]:
    with pytest.raises(InvalidArgument) as refusal:
        parallelize(on_meta(Tabled), SGD, Plan(dp=2), weights=file)
    kept = []
    for plan in (Plan(dp=2), Plan(dp=1, shard=2)):
        model = on_meta(Resettable)
        engine = parallelize(model, SGD, plan, weights=file)
        assert model.second.weight is model.first.weight
        assert model.count.item() == 5
        torch.testing.assert_close(model.table, torch.arange(8.0))
        kept.append(engine.step(torch.ones(1, 8)))
    return str(refusal.value), kept


def test_tables_are_computed_and_dtypes_converted(world: World, tmp_path: Path) -> None:
    torch.manual_seed(1)
    model = Resettable()
    state = {
        name: value.bfloat16() if value.is_floating_point() else value for name, value in model.state_dict().items()
    }
    del state["second.weight"]
    write_file(tmp_path / "one.safetensors", state)
    with torch.no_grad():
        for param in model.parameters():
            param.copy_(param.bfloat16())
        wanted = model(torch.ones(1, 8)).item()
    for text, kept in world.run(with_buffers, tmp_path / "one.safetensors"):
        assert "Tabled) computes table when it is built" in text
        assert kept == pytest.approx([wanted] * 2)


def refusals(folder: Path) -> list[str]:
    texts = []
    for weights, plan in (
        (folder / "none", Plan(dp=2)),
        (folder / "misfit", Plan(dp=2)),
        (folder if dist.get_rank() else folder / "cut", Plan(dp=2)),
        (None if dist.get_rank() else folder, Plan(dp=2)),
        (folder, Plan(dp=1, pp=2, pipeline={"balance": "time", "num_microbatches": 2})),
    ):
        model = on_meta()
        with pytest.raises((InvalidArgument, ConfigurationError, TorshError)) as caught:
            parallelize(model, SGD, plan, loss_fn=next_character_loss, weights=weights, example=(torch.ones(1, 4),))
        assert all(param.is_meta for param in model.parameters())
        texts.append(str(caught.value))
    with pytest.raises(InvalidArgument, match="has values already"):
        parallelize(gpt(), SGD, Plan(dp=2), weights=folder)
    return texts


def test_what_does_not_fit_is_refused_on_every_rank(world: World, tmp_path: Path) -> None:
    state = gpt().state_dict()
    write_folder(tmp_path, state, num_files=2)
    (tmp_path / "cut").mkdir()
    write_file(tmp_path / "cut" / "model.safetensors", state)
    data = (tmp_path / "cut" / "model.safetensors").read_bytes()
    (tmp_path / "cut" / "model.safetensors").write_bytes(data[:-100])
    (tmp_path / "misfit").mkdir()
    write_file(tmp_path / "misfit" / "model.safetensors", {**state, "head.weight": torch.ones(2, 2)})
    for texts in world.run(refusals, tmp_path):
        missing, misfit, damaged, absent, timed = texts
        assert "there is no file or directory" in missing
        assert "head.weight is 29 × 16 float32 in the model, 2 × 2 float32 in the file" in misfit
        assert "not a whole safetensors file" in damaged
        assert "differ" in absent
        assert 'pipeline.balance = "time"' in timed
