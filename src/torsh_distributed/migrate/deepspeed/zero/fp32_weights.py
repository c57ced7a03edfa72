"""`deepspeed.utils.zero_to_fp32`: the weights of a checkpoint in fp32, whole, in one process."""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from torsh_distributed.checkpoint.files.block_hashes import damaged
from torsh_distributed.checkpoint.files.checkpoint_directory import CheckpointDirectory
from torsh_distributed.checkpoint.files.manifest import MARKER, read_manifest
from torsh_distributed.checkpoint.files.verification import find_damage
from torsh_distributed.checkpoint.loading.saved_checkpoint import SavedCheckpoint
from torsh_distributed.errors import CheckpointError
from torsh_distributed.migrate.deepspeed.checkpoints.conversion import fp32_weights as whole_fp32_weights
from torsh_distributed.migrate.deepspeed.training.tagged_checkpoints import SHARED, read_engine_state
from torsh_distributed.migrate.deepspeed.zero.param_access import owner_of, safe_set_full_fp32_param, trained_param
from torsh_distributed.parallel.state.held_state import MODEL, OPTIMIZER
from torsh_distributed.parallel.state.whole_state import StateParts, plain_name


def get_fp32_state_dict_from_zero_checkpoint(
    checkpoint_dir: str, tag: str | None = None, exclude_frozen_parameters: bool = False, lazy_mode: bool = False
) -> dict[str, Tensor]:
    """The model's state with fp32 weights: masters where the checkpoint has them, also of one that DeepSpeed wrote.

    A rank may call it alone, while the others do something else.
    """
    place = _place(Path(checkpoint_dir), tag)
    if not any(place.glob("engine_state_rank*.pt")):
        return whole_fp32_weights(checkpoint_dir, place.name, exclude_frozen=exclude_frozen_parameters)
    # A file of before this was kept has no such entry: then every name has its own tensor.
    shared: Mapping[str, str] = read_engine_state(place).get(SHARED, {})
    saved = _read_alone(place)
    names = [name.removeprefix(f"{MODEL}.") for name in saved.tensors if name.startswith(f"{MODEL}.")]
    found: dict[str, Tensor] = {}
    for name in sorted(names, key=lambda one: one in shared):
        if shared.get(name) in found:
            found[name] = found[shared[name]]
            continue
        master = f"{OPTIMIZER}.state.{name}.master"
        source = master if master in saved.tensors else f"{MODEL}.{name}"
        kind = saved.tensors[source]
        value = torch.empty(kind.shape, dtype=kind.dtype)
        saved.fill(source, StateParts().layout(name, value), value)
        found[name] = value.float() if value.is_floating_point() else value
    return {name: found[name] for name in names}


def convert_zero_checkpoint_to_fp32_state_dict(
    checkpoint_dir: str,
    output_dir: str,
    max_shard_size: str = "5GB",
    safe_serialization: bool = False,
    tag: str | None = None,
    exclude_frozen_parameters: bool = False,
) -> None:
    """Write the weights to `output_dir` as one file: `pytorch_model.bin`, or `model.safetensors`."""
    state = get_fp32_state_dict_from_zero_checkpoint(checkpoint_dir, tag, exclude_frozen_parameters)
    folder = Path(output_dir)
    folder.mkdir(parents=True, exist_ok=True)
    if safe_serialization:
        from safetensors.torch import save_file

        save_file({name: value.contiguous() for name, value in state.items()}, folder / "model.safetensors")
    else:
        torch.save(state, folder / "pytorch_model.bin")


def load_state_dict_from_zero_checkpoint(model: nn.Module, checkpoint_dir: str, tag: str | None = None) -> nn.Module:
    """Load a checkpoint's weights into a model of one process, or into an engine's module, on every rank."""
    state = get_fp32_state_dict_from_zero_checkpoint(checkpoint_dir, tag)
    if all(owner_of(trained_param(param)) is None for param in model.parameters()):
        model.load_state_dict(state, strict=False)
        return model
    for name, param in model.named_parameters():
        value = state.get(plain_name(name))
        if value is not None:
            safe_set_full_fp32_param(param, value)
            if trained_param(param) is not param:  # stage 2 shows whole parameters beside the shards
                param.data.copy_(value)
    buffers = {plain_name(name): value for name, value in model.named_buffers()}
    for name in buffers.keys() & state.keys():
        buffers[name].copy_(state[name])
    return model


def clone_tensors_for_torch_save(item: Any, device: Any = "cpu") -> Any:
    """Copies of the tensors in nested values, each with memory of its own: torch.save writes no more than they hold."""
    if isinstance(item, Tensor):
        whole = item.full_tensor() if hasattr(item, "full_tensor") else item
        return whole.detach().clone().to(device)
    if isinstance(item, Mapping):
        return type(item)({key: clone_tensors_for_torch_save(value, device) for key, value in item.items()})  # type: ignore[call-arg]  # a mapping from pairs
    if isinstance(item, list | tuple):
        return type(item)(clone_tensors_for_torch_save(value, device) for value in item)
    return item


def _read_alone(place: Path) -> SavedCheckpoint:
    """The checkpoint that the Engine wrote under a tag, verified by this process, which may be one rank of a job."""
    steps = CheckpointDirectory(place).complete_steps()
    if not steps and not (place / MARKER).exists():
        raise CheckpointError(f"there is no whole checkpoint in {place}", hint="save it again, or name another tag")
    path = CheckpointDirectory(place).step_path(steps[0]) if steps else place
    manifest = read_manifest(path)
    damage = find_damage(path, manifest)
    if damage:
        raise damaged(path, damage)
    return SavedCheckpoint(path, manifest)


def _place(directory: Path, tag: str | None) -> Path:
    if tag is None:
        latest = directory / "latest"
        if not latest.is_file():
            raise ValueError(f"Unable to find 'latest' file at {latest}")
        tag = latest.read_text(errors="replace").strip()
    if Path(tag).name != tag:
        raise CheckpointError(f"{tag[:200]!r} is not a tag", hint="a tag is the name of one directory")
    place = directory / tag
    if not place.is_dir():
        raise CheckpointError(f"there is no checkpoint {place}", hint="name one of the tags with --tag")
    return place


def main() -> None:
    """The command that a checkpoint directory has as `zero_to_fp32.py`."""
    parser = argparse.ArgumentParser(description="Write the weights of a checkpoint as fp32.")
    parser.add_argument("checkpoint_dir")
    parser.add_argument("output_dir")
    parser.add_argument("-t", "--tag", default=None)
    parser.add_argument("--safe_serialization", action="store_true")
    parser.add_argument("--max_shard_size", default="5GB")
    parser.add_argument("--exclude_frozen_parameters", action="store_true")
    given = parser.parse_args()
    convert_zero_checkpoint_to_fp32_state_dict(
        given.checkpoint_dir, given.output_dir, safe_serialization=given.safe_serialization, tag=given.tag
    )
