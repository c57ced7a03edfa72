"""A YAML or JSON file of another library, read with the limits that plans are read with. Imports no torch."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Self

from torsh_distributed.errors import ConfigurationError, IoError


def read_document(path: Path) -> dict[str, Any]:
    """The table in the file. Raises IoError if it cannot be read, ConfigurationError if it is none."""
    from torsh_distributed.plan.reading import yaml_format
    from torsh_distributed.plan.reading.limits import MalformedError, read_limited

    if not path.is_file():
        raise IoError(f"there is no file {path}", hint="name a config file", path=str(path))
    try:
        text = read_limited(path).decode("utf-8-sig")
        document = json.loads(text) if path.suffix == ".json" else yaml_format.parse(text)
    except (MalformedError, ValueError, RecursionError) as error:
        raise ConfigurationError(f"{path} cannot be read: {error}", path=str(path)) from error
    if not isinstance(document, dict):
        raise ConfigurationError(f"{path} is no table of settings", path=str(path))
    return document


class ForeignConfig:
    """Another library's settings in a dict, or in a file that holds one."""

    def __init__(self, values: Mapping[str, Any]) -> None:
        self.values = values

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Self:
        """A dict of sections."""
        return cls(values)

    @classmethod
    def from_file(cls, path: str | Path) -> Self:
        """A JSON or YAML file."""
        return cls(read_document(Path(path)))
