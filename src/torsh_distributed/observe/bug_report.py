"""The bundle for a bug report: gathered, with secrets kept out of it."""

from __future__ import annotations

import importlib.metadata
import io
import json
import os
import tarfile
import time
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from torsh_distributed.errors import IoError
from torsh_distributed.observe.machine.diagnostic_result import DiagnosticResult
from torsh_distributed.observe.secret_mask import SecretMask
from torsh_distributed.private_files import open_private, read_secret

_MAX_FILE_BYTES = 1 << 20
_MAX_FILES = 200
_SYSTEM_FILES = (
    "/proc/cpuinfo",
    "/proc/meminfo",
    "/proc/version",
    "/proc/net/route",
    "/proc/net/dev",
    "/etc/os-release",
)
_TEXT_SUFFIXES = frozenset({".log", ".jsonl", ".json", ".toml", ".yaml", ".yml", ".txt", ".csv", ""})


def collect(
    target: Path,
    *,
    environ: Mapping[str, str],
    results: Iterable[DiagnosticResult],
    files: Iterable[Path] = (),
    reports: Mapping[str, Any] | None = None,
) -> list[str]:
    """Write the archive (.tar.gz, for this user alone) and return the names in it.

    `files` are plans, logs and events, or directories of them; of each text file the last megabyte is taken, of others
    only the name and size. Everything passes the mask.
    """
    mask = SecretMask(environ, also=_job_secrets(environ))
    parts: dict[str, str] = {
        "versions.json": _json(_versions()),
        "checks.json": _json([result.to_dict() for result in results]),
        "environment.json": _json(mask.variables(environ)),
    }
    for path in map(Path, _SYSTEM_FILES):
        if path.exists():
            parts[f"system/{path.name}"] = path.read_text(errors="replace")[:_MAX_FILE_BYTES]
    for name, report in (reports or {}).items():
        parts[f"reports/{name}.json"] = _json(report)
    parts.update(_files(files))
    stem = target.name.removesuffix(".tar.gz").removesuffix(".tgz")
    try:
        fd = open_private(target, os.O_WRONLY | os.O_TRUNC)
    except OSError as error:
        raise IoError("the archive cannot be written", path=str(target), reason=str(error)) from error
    with os.fdopen(fd, "wb") as file, tarfile.open(fileobj=file, mode="w:gz") as archive:
        for name, text in parts.items():
            data = mask.text(text).encode(errors="replace")
            entry = tarfile.TarInfo(mask.text(f"{stem}/{name}"))
            entry.size, entry.mtime, entry.mode = len(data), int(time.time()), 0o600
            archive.addfile(entry, io.BytesIO(data))
    return list(parts)


def _json(value: Any) -> str:
    return json.dumps(value, indent=2, default=str) + "\n"


def _versions() -> dict[str, str]:
    found = {
        dist.metadata["Name"]: dist.version for dist in importlib.metadata.distributions() if dist.metadata["Name"]
    }
    return dict(sorted(found.items()))


def _job_secrets(environ: Mapping[str, str]) -> list[str]:
    path = environ.get("TORSH_SECRET_FILE")
    if not path or not Path(path).exists():
        return []
    try:
        return [read_secret(Path(path))]
    except OSError:  # of another user: then nothing here could have read it either
        return []


def _files(paths: Iterable[Path]) -> dict[str, str]:
    parts: dict[str, str] = {}
    for given in paths:
        found = [given] if given.is_file() else sorted(path for path in given.rglob("*") if path.is_file())
        if not found:
            raise IoError(
                "there is nothing to collect", hint="give a plan, a log or an events directory", path=str(given)
            )
        for path in found[:_MAX_FILES]:
            name = path.name if path is given else str(path.relative_to(given.parent))
            size = path.stat().st_size
            if path.suffix in _TEXT_SUFFIXES:
                with path.open("rb") as file:
                    file.seek(max(0, size - _MAX_FILE_BYTES))
                    parts[f"files/{name}"] = file.read().decode(errors="replace")
            else:
                parts[f"files/{name}.size"] = f"{size} bytes, not taken\n"
        if len(found) > _MAX_FILES:
            parts[f"files/{given.name}.more"] = f"{len(found) - _MAX_FILES} more files were left out\n"
    return parts
