"""What the ranks have agreed on stays agreed from save to save, until anything changes on any rank."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

from tests.bed.world import World
from torsh_distributed.checkpoint import CheckpointManager
from torsh_distributed.checkpoint.saving.box_agreement import SIGNATURE_BYTES, BoxAgreement
from torsh_distributed.checkpoint.saving.file_image import FileImage
from torsh_distributed.comm.recording.flight_recorder import recorder
from torsh_distributed.errors import CheckpointError
from torsh_distributed.parallel.state.held_tensors import HeldTensor, layout_of, whole_runs
from torsh_distributed.plan import CheckpointConfig


def held(name: str, *shape: int, dtype: torch.dtype = torch.float32) -> HeldTensor:
    return HeldTensor(name, layout_of(shape, whole_runs(shape), shape), dtype, lambda: torch.zeros(shape, dtype=dtype))


def test_a_signature_changes_with_what_is_held_and_with_nothing_else() -> None:
    boxes = BoxAgreement(None)
    first = boxes.signature([held("a", 2, 3), held("b", 4)])
    assert len(first) == SIGNATURE_BYTES
    assert boxes.settle([first])
    assert boxes.signature([held("a", 2, 3), held("b", 4)]) == first
    assert not boxes.settle([first])
    others = [
        [held("a", 2, 3)],
        [held("a", 2, 3), held("c", 4)],
        [held("a", 3, 2), held("b", 4)],
        [held("a", 2, 3), held("b", 4, dtype=torch.int32)],
    ]
    found = {boxes.signature(one) for one in others}
    assert len(found | {first}) == 1 + len(others)
    assert boxes.settle([boxes.signature(others[0])])
    assert list(boxes.claims[0]) == ["a"]


def num_calls(call: Callable[[], Any]) -> int:
    """Collectives of the world that a call takes; those of the writer's own group are not training's."""
    world = dist.group.WORLD
    assert world is not None

    def seen() -> int:
        return sum(record.group == world.group_name for record in recorder)

    before = seen()
    call()
    return seen() - before


def changing(folder: str) -> list[int]:
    """Saves while names, dtypes, shards and meshes change, on one rank or on all; returns the calls of each save."""
    rank = dist.get_rank()
    whole = torch.arange(24.0).view(4, 6)
    flat, grid = init_device_mesh("cpu", (2,)), init_device_mesh("cpu", (2, 1))
    module = nn.Module()
    module.register_buffer("x", distribute_tensor(whole, flat, [Shard(0)]))
    module.register_buffer("y", torch.full((3,), 1.0))
    calls = []

    def others(number: int) -> None:
        if number == 1 and rank == 1:
            module.register_buffer("mine", torch.full((5,), 7.0))
        elif number == 2:
            module.y = module.y.to(torch.float64)
        elif number == 3:
            module.x = distribute_tensor(whole, flat, [Shard(1)])
        elif number == 4:
            module.x = distribute_tensor(whole, grid, [Shard(0), Replicate()])
        elif number == 5:
            module.x = distribute_tensor(whole.mul(2), grid, [Shard(0), Replicate()])  # other values alone
        elif number == 6 and rank == 1:
            del module.mine

    config = CheckpointConfig(dir=folder, keep=9, verify_after_save=False)
    with CheckpointManager(config) as manager:
        for number in range(7):
            others(number)
            for again in range(2):
                step = 2 * number + again + 1
                calls.append(num_calls(lambda step=step: manager.save(step, {"model": module})))
            found = nn.Module()
            found.register_buffer("x", torch.zeros(4, 6))
            found.register_buffer("y", torch.zeros(3, dtype=module.y.dtype))
            if 1 <= number < 6:
                found.register_buffer("mine", torch.zeros(5))
            assert manager.load({"model": found}).metadata.step == step
            assert torch.equal(found.x, whole * (2 if number >= 5 else 1))
            assert found.y.tolist() == [1.0] * 3
            assert "mine" not in found._buffers or found.mine.tolist() == [7.0] * 5
    return calls


def test_a_change_on_any_rank_is_agreed_anew_and_what_stays_costs_one_collective(world: World, tmp_path: Path) -> None:
    calls = world.run(changing, str(tmp_path), num_ranks=2, backend="gloo", timeout_s=100)
    assert calls[0] == calls[1]
    first, again = calls[0][::2], calls[0][1::2]
    assert again == [1] * 7
    assert first[5] == 1  # other values alone
    assert all(count > 1 for number, count in enumerate(first) if number != 5)


def unreadable(folder: str) -> list[str]:
    """Rank 1 cannot read its state: all learn it at the next call, and the save after that is whole."""
    value, is_broken = torch.ones(3), True

    class Held(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer(f"x{dist.get_rank()}", value)

    texts = []
    with CheckpointManager(folder) as manager, pytest.MonkeyPatch.context() as patch:
        copy_in = FileImage.copy_in

        def refused(image: FileImage, tensors: Sequence[HeldTensor]) -> None:
            if is_broken and dist.get_rank() == 1:
                raise OSError("the drive does not answer")
            copy_in(image, tensors)

        patch.setattr(FileImage, "copy_in", refused)
        manager.save(1, {"model": Held()}, wait=False)
        with pytest.raises(CheckpointError) as caught:
            manager.wait()
        texts.append(caught.value.message)
        is_broken = False
        manager.save(2, {"model": Held()})
        assert manager.directory.complete_steps() == [2]
    return texts


def test_a_rank_that_cannot_copy_its_state_fails_the_save_on_all(world: World, tmp_path: Path) -> None:
    for (text,) in world.run(unreadable, str(tmp_path), num_ranks=2, backend="gloo"):
        assert "step 1 was not saved: rank 1: its state cannot be copied: the drive does not answer" in text
