"""Weights of a model on the meta device, streamed from files into what this rank holds of it.

A strategy splits the model while it has no memory; then `allocate` gives memory to what is left on this rank, and
`load` reads those bytes and no others. No rank holds the whole model unless its strategy says so.
"""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from typing_extensions import override

from torsh_distributed.comm.agreement import fail_together, require_same
from torsh_distributed.comm.groups import process_group
from torsh_distributed.comm.shared_memory.memory_file import MemoryFile
from torsh_distributed.errors import CheckpointError, IoError
from torsh_distributed.parallel.local_tensors import local_of
from torsh_distributed.parallel.models.materialize import ParamInit
from torsh_distributed.parallel.state.whole_state import plain_name
from torsh_distributed.parallel.weights.model_weights import HeldParts, ModelWeights, compute_buffers, copy_part
from torsh_distributed.parallel.weights.reading import RowRead, read_rows
from torsh_distributed.parallel.weights.stacked_tensor import Stored, row_reads, whole_of
from torsh_distributed.parallel.weights.tensor_files import stored_tensors
from torsh_distributed.parallel.weights.weight_names import converted, match_names


class StoredWeights(ModelWeights):
    """The weights of `model` at `path`; every rank of the world constructs it, before the model is split.

    A checkpoint that does not fit raises InvalidArgument on every rank, with all differences; the model is unchanged
    then. Buffers that no checkpoint holds, such as rotary tables, are computed here: by `init_fn(module)`, the model's
    own `_init_weights(module)` (transformers) or the module's `reset_parameters()`.
    """

    def __init__(self, model: nn.Module, path: str | Path, *, init_fn: ParamInit | None = None) -> None:
        super().__init__(process_group.device())
        self.path = Path(path)
        self._stored: dict[str, Stored] = {}
        with fail_together(f"read the weights in {path}", dist.group.WORLD):
            try:
                self._stored = match_names(model, converted(model, stored_tensors(self.path)), where=str(path))
            except OSError as error:
                raise IoError(f"the weights in {path} cannot be read: {error}", operation="load weights") from error
            compute_buffers(model, self.device, init_fn=init_fn)
        world = dist.group.WORLD
        assert world is not None, "parallelize() checks that the group is up"
        described = {name: f"{one.shape} {one.dtype}" for name, one in self._stored.items()}
        require_same({"tensors": described}, group=world, what="the weights that ranks find", hint=f"copy {path} again")

    @override
    @torch.no_grad()
    def load(
        self,
        module: nn.Module,
        parts: HeldParts | None = None,
        *,
        names: Collection[str] | None = None,
        memory: MemoryFile | None = None,
    ) -> None:
        chosen = parts or HeldParts()
        with fail_together(f"load the weights in {self.path}", dist.group.WORLD):
            try:
                self._read(module, chosen, names, memory)
            except OSError as error:
                raise IoError(f"loading from {self.path} failed: {error}", operation="load weights") from error

    def _read(
        self, module: nn.Module, parts: HeldParts, names: Collection[str] | None, memory: MemoryFile | None
    ) -> None:
        reads: list[RowRead] = []
        seen: set[int] = set()
        for name, held in module.state_dict(keep_vars=True).items():
            plain = plain_name(name)
            if id(held) in seen or (names is not None and plain not in names) or plain not in self._stored:
                continue
            seen.add(id(held))
            if held.is_meta:
                raise CheckpointError(
                    f"{plain} has no memory to be read into", hint="this is our mistake: please report it"
                )
            stored, into = self._stored[plain], local_of(held.detach())
            rows = parts.rows(plain, stored.shape, held)
            if rows is None:
                copy_part(parts, plain, whole_of(stored), held)
                continue
            begin = 0
            for start, stop in rows:
                target = into if not into.dim() else into[begin : begin + stop - start]
                reads += row_reads(stored, start, stop, target)
                begin += stop - start
        read_rows(reads, memory)
