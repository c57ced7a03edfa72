"""What to do with a checkpoint of DeepSpeed: load it into an Engine, keep it as our checkpoint, or its weights.

Every rank calls `load_deepspeed` and reads what its own part of the plan needs. The other two run in one process.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from torch import Tensor

from torsh_distributed.migrate.deepspeed.checkpoints.deepspeed_state import CheckpointFacts, open_checkpoint
from torsh_distributed.migrate.foreign_state import SHARD_BYTES, keep_foreign, load_foreign, write_foreign_weights
from torsh_distributed.parallel.state.held_state import MODEL, OPTIMIZER
from torsh_distributed.train.engine import Engine


def load_deepspeed(
    engine: Engine,
    source: str | Path,
    tag: str | None = None,
    *,
    model_only: bool = False,
    strict: bool = True,
    inert: Sequence[str] = (),
) -> CheckpointFacts:
    """Load a checkpoint of DeepSpeed into an Engine, under any plan and at any world size; every rank calls this.

    The optimizer must have the parameters that it had; in other groups it keeps its own settings. With `model_only`,
    weights and buffers alone. Returns what the checkpoint says besides: steps, the script's client state, the config.
    """
    saved = open_checkpoint(source, tag, with_optimizer=not model_only, inert=inert)
    load_foreign(engine, saved, model_only=model_only, strict=strict)
    return saved.facts


def convert_checkpoint(
    source: str | Path, directory: str | Path, tag: str | None = None, *, inert: Sequence[str] = ()
) -> Path:
    """Write a checkpoint of DeepSpeed as one that `engine.load` reads under any plan; returns its directory.

    The script's client state is kept under `client_state`, as far as it is plain values.
    """
    return keep_foreign(open_checkpoint(source, tag, inert=inert), directory)


def fp32_weights(
    source: str | Path, tag: str | None = None, *, exclude_frozen: bool = False, inert: Sequence[str] = ()
) -> dict[str, Tensor]:
    """The whole model in fp32, by name: what DeepSpeed's `get_fp32_state_dict_from_zero_checkpoint` returns."""
    saved = open_checkpoint(source, tag, with_optimizer=exclude_frozen, inert=inert)
    names = saved.weights
    if exclude_frozen:
        trained = {name for group in saved.values[OPTIMIZER]["param_groups"] for name in group["params"]}
        names = [name for name in names if name in trained]
    return {name: saved.whole(f"{MODEL}.{name}") for name in names}


def write_weights(
    source: str | Path,
    out: str | Path,
    tag: str | None = None,
    *,
    file_format: str = "safetensors",
    dtype: str = "fp32",
    shard_bytes: int = SHARD_BYTES,
    inert: Sequence[str] = (),
) -> list[Path]:
    """Write the model's weights as DeepSpeed's zero_to_fp32.py does: safetensors, or `bin` for torch.save.

    safetensors files are as `from_pretrained` reads them, with an index if there are several; `bin` is one file,
    pytorch_model.bin. Returns the files. The directory must be empty or new.
    """
    saved = open_checkpoint(source, tag, with_optimizer=False, inert=inert)
    return write_foreign_weights(saved, out, file_format=file_format, dtype=dtype, shard_bytes=shard_bytes)
