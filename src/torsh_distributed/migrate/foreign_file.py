"""A YAML or JSON file of another library, read with the limits that plans are read with. Imports no torch."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from torsh_distributed.errors import ConfigurationError, IoError


def read_document(path: Path) -> dict[str, Any]:
    """The table in the file. Raises IoError if it cannot be read, ConfigurationError if it is none."""
    from torsh_distributed.plan.reading import yaml_format
    from torsh_distributed.plan.reading.limits import read_limited
    from torsh_distributed.plan.reading.malformed import MalformedError

    if not path.is_file():
        raise IoError(f"there is no file {path}", hint="name a config file", path=str(path))
    try:
        text = read_limited(path).decode("utf-8-sig")
        document = json.loads(text) if path.suffix == ".json" else yaml_format.parse(text)
    except (MalformedError, ValueError) as error:
        raise ConfigurationError(f"{path} cannot be read: {error}", path=str(path)) from error
    if not isinstance(document, dict):
        raise ConfigurationError(f"{path} is no table of settings", path=str(path))
    return document
