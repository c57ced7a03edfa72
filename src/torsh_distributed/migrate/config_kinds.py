"""Config files of other libraries: which kind a file is, and what makes a plan of it. Imports no torch.

Each kind has a module with two functions: `looks_like(document)`, whether a parsed file is of that kind, and
`translate(path, world_size=…, fills=…, version=…)`, which returns a plan and a report.
"""

from __future__ import annotations

import difflib
import importlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from torsh_distributed.errors import CheckpointError, ConfigurationError, FeatureNotAvailable, IoError
from torsh_distributed.migrate.deepspeed.checkpoints.deepspeed_state import open_checkpoint
from torsh_distributed.migrate.foreign_state import ForeignState
from torsh_distributed.migrate.pytorch.torch_checkpoint import open_torch_checkpoint, require_optimizer
from torsh_distributed.migrate.pytorch.torch_files import INDEX
from torsh_distributed.migrate.report import MigrationReport
from torsh_distributed.plan import Plan


def open_any_checkpoint(
    source: Path,
    tag: str | None = None,
    *,
    weights_only: bool = False,
    model_key: str | None = None,
    inert: Sequence[str] = (),
) -> ForeignState:
    """A checkpoint of another library. `tag` is DeepSpeed's, `model_key` torch's; without weights alone, whole ones."""
    if not (source.is_file() or (source / INDEX).is_file()):
        return open_checkpoint(source, tag, with_optimizer=not weights_only, inert=inert)
    if tag is not None:
        raise CheckpointError("checkpoints of plain torch have no tags", hint="leave out --tag", source=str(source))
    saved = open_torch_checkpoint(source, model_key=model_key, inert=inert)
    if not weights_only:
        require_optimizer(saved)
    return saved


CONFIG_KINDS = {
    "deepspeed": "torsh_distributed.migrate.deepspeed.config.deepspeed_config",
    "accelerate": "torsh_distributed.migrate.launchers.accelerate_config",
    "horovod": "torsh_distributed.migrate.horovod.horovod_config",
    "pytorch": "torsh_distributed.migrate.pytorch.pytorch_config",
    "fairscale": "torsh_distributed.migrate.fairscale.fairscale_config",
}
"""The kinds that are known, with the module of each."""


def translate_config(
    path: Path, *, kind: str | None = None, strict: bool = False, **options: Any
) -> tuple[Plan, MigrationReport]:
    """The plan of a config file, and a verdict on every key of it; the kind is found out unless it is named.

    `strict` is for DeepSpeed, which ignores keys that it does not have; others refuse them anyway.
    """
    if not path.is_file():
        raise IoError(f"there is no file {path}", hint="name a config of another library, or `check` and a script")
    if kind is not None and kind not in CONFIG_KINDS:
        near = difflib.get_close_matches(kind, CONFIG_KINDS, n=1)
        raise ConfigurationError(
            f"configs of {kind!r} are not known",
            hint=f"did you mean {near[0]}?" if near else f"known: {', '.join(CONFIG_KINDS)}",
        )
    chosen = kind or _kind_of(path)
    module: Any = importlib.import_module(CONFIG_KINDS[chosen])
    if chosen == "deepspeed":
        options["strict"] = strict
    found: tuple[Plan, MigrationReport] = module.translate(path, **options)
    return found


def _kind_of(path: Path) -> str:
    document = _document(path)
    for kind, name in CONFIG_KINDS.items():
        if document is not None and importlib.import_module(name).looks_like(document):
            return kind
    raise ConfigurationError(
        f"{path} does not look like a config of {' or '.join(CONFIG_KINDS)}",
        hint=f"name its kind: --from {next(iter(CONFIG_KINDS))}",
    )


def _document(path: Path) -> Mapping[str, Any] | None:
    """The file as HJSON or YAML, whichever it is; None if it is neither. A kind reads it again, and strictly.

    Raises FeatureNotAvailable if it is neither JSON nor YAML and HJSON cannot be read here.
    """
    from torsh_distributed.migrate.deepspeed.config.hjson_format import parse_hjson
    from torsh_distributed.plan.reading import yaml_format
    from torsh_distributed.plan.reading.limits import MalformedError, read_limited

    readers = [parse_hjson, yaml_format.parse] if path.suffix not in (".yaml", ".yml") else [yaml_format.parse]
    missing: FeatureNotAvailable | None = None
    for parse in readers:
        try:
            document = parse(read_limited(path).decode("utf-8-sig"))
        except (MalformedError, UnicodeDecodeError):
            continue
        except FeatureNotAvailable as error:
            missing = error
            continue
        if isinstance(document, dict):
            return document
    if missing is not None:
        raise missing
    return None
