"""Which stored tensor belongs to which of a model's: names as transformers matches them, differences all at once.

A model with a head reads the weights of its base model's checkpoint under the base's prefix, and a base model those of
a checkpoint with a head; shared parameters need one of their names; buffers that are computed are not read.

Stored tensors under the names that a model of transformers has now: checkpoints keep older names and other forms.
transformers declares, for each kind of model, how names changed and which tensors it puts together. Its declarations
are read here; what they ask for is done while rows are read, so no rank holds more than its part. Checkpoints of models
with experts hold them one by one, also when transformers saves them, while the model keeps them stacked.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

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


_SHOWN = 12


@dataclass(frozen=True)
class _Differences:
    missing: list[str]
    unknown: list[str]
    misfits: list[str]

    def __bool__(self) -> bool:
        return bool(self.missing or self.unknown or self.misfits)


def match_names(model: nn.Module, stored: Mapping[str, Stored], *, where: str) -> dict[str, Stored]:
    """The stored tensor for every tensor of the model's state, by plain name; InvalidArgument if they do not fit.

    A shared parameter's names all lead to the same stored tensor. Changes nothing and sends nothing.
    """
    held = {plain_name(name): value for name, value in model.state_dict(keep_vars=True).items()}
    prefix = str(getattr(model, "base_model_prefix", "") or "")
    by_tensor: dict[int, str] = {}
    for name, value in held.items():
        found = _stored_name(name, stored, prefix)
        if found is not None:
            by_tensor.setdefault(id(value), found)
    matched = {name: stored[by_tensor[id(value)]] for name, value in held.items() if id(value) in by_tensor}
    used = {_stored_name(name, stored, prefix) for name in held}
    is_ignored = _ignored_names(model, held, stored, prefix)
    differences = _Differences(
        missing=[name for name in held if name not in matched],
        unknown=[name for name in stored if name not in used and not is_ignored(name)],
        misfits=[
            f"{name} is {_shape(held[name])} in the model, {_shape(one)} in the file"
            for name, one in matched.items()
            if tuple(held[name].shape) != one.shape or held[name].is_floating_point() != one.dtype.is_floating_point
        ],
    )
    if differences:
        raise _refusal(differences, where)
    return matched


def _stored_name(name: str, stored: Mapping[str, Stored], prefix: str) -> str | None:
    """Under which name a tensor of the model is stored: its own, or with the base model's prefix less or more."""
    candidates = [name]
    if prefix:
        candidates += [name.removeprefix(f"{prefix}."), f"{prefix}.{name}"]
    return next((one for one in candidates if one in stored), None)


def _ignored_names(
    model: nn.Module, held: Mapping[str, Tensor], stored: Mapping[str, Stored], prefix: str
) -> Callable[[str], bool]:
    """Whether a stored tensor may be left: a head that the model lacks, a buffer that the model computes itself."""
    reads_base = any(f"{prefix}.{name}" in stored for name in held) and not any(name in stored for name in held)
    computed = {plain_name(name) for name, _ in model.named_buffers()}
    patterns: Iterable[str] = getattr(model, "_keys_to_ignore_on_load_unexpected", None) or ()

    def is_ignored(name: str) -> bool:
        return (
            (reads_base and not name.startswith(f"{prefix}."))
            or bool({name, name.removeprefix(f"{prefix}."), f"{prefix}.{name}"} & computed)
            or any(re.search(pattern, name) for pattern in patterns)
        )

    return is_ignored


def _refusal(found: _Differences, where: str) -> InvalidArgument:
    lines = []
    if found.missing:
        lines.append(f"the model needs what the checkpoint has not ({len(found.missing)}):")
        lines += _grouped(found.missing, near=found.unknown)
    if found.unknown:
        lines.append(f"the checkpoint has what the model does not know ({len(found.unknown)}):")
        lines += _grouped(found.unknown, near=found.missing)
    if found.misfits:
        lines.append(f"shapes or kinds differ ({len(found.misfits)}):")
        lines += [f"  {line}" for line in found.misfits[:_SHOWN]]
        if len(found.misfits) > _SHOWN:
            lines.append(f"  and {len(found.misfits) - _SHOWN} more")
    return InvalidArgument(
        "\n".join([f"the weights in {where} do not fit the model", *lines]),
        hint="build the model from the checkpoint's own config.json, or rename the tensors; nothing was changed",
        missing=len(found.missing),
        unknown=len(found.unknown),
        misfits=len(found.misfits),
    )


def _grouped(names: list[str], *, near: list[str]) -> list[str]:
    """A line for each kind of name, numbers as `*`, with the nearest name on the other side."""
    kinds: dict[str, list[str]] = {}
    for name in names:
        kinds.setdefault(re.sub(r"(?<=\.)\d+(?=\.)", "*", name), []).append(name)
    lines = []
    for kind, alike in list(kinds.items())[:_SHOWN]:
        close = difflib.get_close_matches(alike[0], near, n=1, cutoff=0.6)
        count = f" × {len(alike)}" if len(alike) > 1 else ""
        lines.append(f"  {kind if len(alike) > 1 else alike[0]}{count}" + (f" (near: {close[0]})" if close else ""))
    if len(kinds) > _SHOWN:
        lines.append(f"  and {len(kinds) - _SHOWN} kinds more")
    return lines


def _shape(tensor: Tensor | Stored) -> str:
    return f"{' × '.join(map(str, tensor.shape)) or 'one value'} {str(tensor.dtype).removeprefix('torch.')}"
