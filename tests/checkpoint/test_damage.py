"""Damage of every kind to every file, and kills at any instant: never a wrong load, never an error without the file."""

from __future__ import annotations

import os
import random
import shutil
import signal
import time
from pathlib import Path

import pytest
import torch

from torsh_distributed.checkpoint import CheckpointManager
from torsh_distributed.checkpoint.files.manifest import is_checkpoint
from torsh_distributed.errors import CheckpointError
from torsh_distributed.plan import CheckpointConfig


def values(step: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(step)
    return {f"t{number}": torch.randn(number * 97 + 1, generator=generator) for number in range(8)}


def flip(path: Path, draw: random.Random) -> None:
    data = bytearray(path.read_bytes())
    for _ in range(draw.choice([1, 1, 1, 5])):
        data[draw.randrange(len(data))] ^= 1 << draw.randrange(8)
    path.write_bytes(data)


def truncate(path: Path, draw: random.Random) -> None:
    os.truncate(path, draw.randrange(path.stat().st_size))


def extend(path: Path, draw: random.Random) -> None:
    with path.open("ab") as file:
        file.write(draw.randbytes(draw.randrange(1, 100)))


def remove(path: Path, draw: random.Random) -> None:
    path.unlink()


def swap(path: Path, draw: random.Random) -> None:
    other = draw.choice([one for one in sorted(path.parent.iterdir()) if one != path])
    aside = path.with_name("aside")
    path.rename(aside)
    other.rename(path)
    aside.rename(other)


def link(path: Path, draw: random.Random) -> None:
    aside = path.parent.parent / f"aside-{path.name}"
    path.rename(aside)
    path.symlink_to(aside)


KINDS = (flip, flip, flip, truncate, extend, remove, swap, link)


def damage_many(tmp_path: Path, count: int) -> None:
    draw = random.Random(7)
    with CheckpointManager(tmp_path / "good") as manager:
        manager.save(1, values(1))
    good = tmp_path / "good" / "step-00000001"
    files = sorted(path.name for path in good.iterdir())
    for number in range(count):
        place = tmp_path / f"damaged-{number}"
        shutil.copytree(good, place / "step-00000001")
        name, kind = files[number % len(files)], KINDS[number // len(files) % len(KINDS)]
        before = {path.name: path.read_bytes() for path in (place / "step-00000001").iterdir()}
        kind(place / "step-00000001" / name, draw)
        after = {path.name: path.read_bytes() for path in (place / "step-00000001").iterdir()}
        touched = [
            one for one in before if before[one] != after.get(one) or (place / "step-00000001" / one).is_symlink()
        ]
        with CheckpointManager(place) as manager, pytest.raises(CheckpointError) as caught:
            manager.load(values(2))
        named = [one for one in files if one in caught.value.message]
        # Manifest and marker vouch for each other: either may be named for the other.
        pair = {"manifest.json", "COMMITTED"}
        assert set(named) & (set(touched) | (pair if pair & set(touched) else set())), (
            name,
            kind.__name__,
            caught.value,
        )
        shutil.rmtree(place)


def test_damage_is_never_loaded_and_always_named(tmp_path: Path) -> None:
    damage_many(tmp_path, 60)


@pytest.mark.matrix
def test_a_thousand_damages(tmp_path: Path) -> None:
    damage_many(tmp_path, 1000)


def save_for_ever(folder: str) -> None:
    with CheckpointManager(CheckpointConfig(dir=folder, keep=2, keep_best=0)) as manager:
        step = max(manager.directory.complete_steps(), default=0)
        while True:
            step += 1
            manager.save(
                step, {**values(step), "step": torch.tensor(step), "large": torch.full((300_000,), float(step))}
            )


def kill_many(folder: Path, count: int) -> None:
    draw = random.Random(3)
    for _ in range(count):
        child = os.fork()
        if child == 0:
            try:
                save_for_ever(str(folder))
            finally:
                os._exit(1)
        while not list(folder.glob(".step-*")) and not list(folder.glob("step-*")):
            time.sleep(0.001)
        time.sleep(draw.uniform(0.0, 0.06))
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        looks = [path for path in folder.iterdir() if not path.name.startswith(".")]
        assert all(is_checkpoint(path) for path in looks), looks
        if not looks:
            continue
        with CheckpointManager(folder) as manager:
            state = {**values(0), "step": torch.tensor(0), "large": torch.zeros(300_000)}
            found = manager.load(state)
            newest = max(int(path.name.removeprefix("step-")) for path in looks)
            assert found.metadata.step == newest
            assert float(found.values["large"][-1]) == newest == int(found.values["step"])
            assert torch.equal(found.values["t3"], values(newest)["t3"])


def test_after_a_kill_the_newest_checkpoint_loads(tmp_path: Path) -> None:
    kill_many(tmp_path, 10)


@pytest.mark.matrix
def test_two_hundred_kills(tmp_path: Path) -> None:
    kill_many(tmp_path, 200)
