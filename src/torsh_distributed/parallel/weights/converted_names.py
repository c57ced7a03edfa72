"""Stored tensors under the names that a model of transformers has now: checkpoints keep older names and other forms.

transformers declares, for each kind of model, how names changed and which tensors it puts together. Its declarations
are read here; what they ask for is done while rows are read, so no rank holds more than its part. Checkpoints of models
with experts hold them one by one, also when transformers saves them, while the model keeps them stacked.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from torch import nn

from torsh_distributed.errors import InvalidArgument
from torsh_distributed.parallel.state.whole_state import plain_name
from torsh_distributed.parallel.weights.safetensors_format import FileTensor
from torsh_distributed.parallel.weights.stacked_tensor import StackedTensor, Stored


def converted(model: nn.Module, stored: Mapping[str, FileTensor]) -> dict[str, Stored]:
    """The stored tensors by the model's names where transformers knows them, experts stacked; others as they are.

    Raises InvalidArgument for a tensor that transformers would compute from the stored ones in another way.
    """
    known = {plain_name(name) for name in model.state_dict()}
    prefix = f"{getattr(model, 'base_model_prefix', '')}."

    def is_known(name: str) -> bool:
        return bool({name, name.removeprefix(prefix), f"{prefix}{name}"} & known)

    # Asking transformers takes a tenth of a second: it compiles its patterns for all kinds of models.
    transforms = [] if all(map(is_known, stored)) else _transforms(model)
    if not transforms:
        return dict(stored)
    from transformers.core_model_loading import WeightConverter, WeightRenaming, rename_source_key

    renamings = [one for one in transforms if isinstance(one, WeightRenaming)]
    converters = [one for one in transforms if isinstance(one, WeightConverter)]
    by_pattern = {pattern: one for one in converters for pattern in one.source_patterns}
    out: dict[str, Stored] = {}
    collected: dict[str, dict[str, list[FileTensor]]] = {}
    for name in sorted(stored, key=_by_number):
        new, pattern = rename_source_key(name, renamings, converters)
        if new == name or is_known(name) or not is_known(new):
            out[name] = stored[name]
        elif pattern is None:
            out[new] = stored[name]
        else:
            collected.setdefault(new, {}).setdefault(pattern, []).append(stored[name])
    for name, parts in collected.items():
        out[name] = _stacked(name, parts, by_pattern[next(iter(parts))])
    return out


def _transforms(model: nn.Module) -> list[Any]:
    """What transformers does with the names of a checkpoint of this model; nothing for other models."""
    if not hasattr(model, "base_model_prefix"):
        return []
    try:
        from transformers import PreTrainedModel
        from transformers.conversion_mapping import get_model_conversion_mapping
    except ImportError:  # another library's model with the same conventions, or an older transformers
        return []
    return list(get_model_conversion_mapping(model)) if isinstance(model, PreTrainedModel) else []


def _stacked(name: str, parts: Mapping[str, list[FileTensor]], converter: Any) -> Stored:
    """Experts in a row, each made of the parts that the converter names, in its order."""
    kinds = [(type(one).__name__, getattr(one, "dim", None)) for one in converter.operations]
    columns = [parts[pattern] for pattern in converter.source_patterns if pattern in parts]
    is_known = kinds in ([("MergeModulelist", 0)], [("MergeModulelist", 0), ("Concatenate", 1)])
    if is_known and len(columns) == len(converter.source_patterns) and len({len(one) for one in columns}) == 1:
        found = StackedTensor(tuple(zip(*columns, strict=True)))
        if found.is_even and (len(columns) == 1 or len(kinds) == 2):
            return found
    raise InvalidArgument(
        f"{name} is not stored as it is: transformers makes it of {sum(map(len, columns))} tensors by"
        f" {' and '.join(kind for kind, _ in kinds)}",
        hint="load the model with from_pretrained and write it with save_pretrained(path, save_original_format=False)",
        stored=tuple(converter.source_patterns),
    )


def _by_number(name: str) -> list[Any]:
    """Expert 10 comes after expert 9."""
    return [(0, int(part), "") if part.isdigit() else (1, 0, part) for part in re.split(r"\.", name)]
