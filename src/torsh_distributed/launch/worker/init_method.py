"""Where ranks meet, as torch's `init_method` names it: `env://`, `tcp://host:port` or `file:///path`."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any
from urllib.parse import parse_qsl, unquote, urlsplit

import torch.distributed as dist

from torsh_distributed.errors import ConfigurationError, InvalidArgument
from torsh_distributed.launch.worker.environment import Environment

_EXAMPLES = "'env://', 'tcp://10.0.0.1:29500' or 'file:///shared/job7'"
_MET = "torsh/0/all-up"
"""The key that a world sets once it is up."""


def place_for(init_method: str, place: Environment) -> tuple[Environment, dist.Store | None]:
    """The place in the job with the address of `init_method`, and the store to meet in if it is a file.

    As in torch, `?rank=…&world_size=…` may be part of the address; they win over the environment.
    """
    parts = urlsplit(init_method)
    given = _given(init_method, parts.query)
    if parts.scheme == "env" and not (parts.netloc or parts.path):
        return dataclasses.replace(place, **given), None
    if parts.scheme == "tcp":
        host, port = _address(init_method)
        is_same = (host, port) == (place.master_addr, place.master_port)
        found = dataclasses.replace(
            place, **given, master_addr=host, master_port=port, has_agent_store=place.has_agent_store and is_same
        )
        return found, None
    if parts.scheme == "file":
        found = dataclasses.replace(place, **given)
        return found, _file_store(init_method, parts.netloc, Path(unquote(parts.path)), found.world_size)
    raise InvalidArgument("unknown init_method", hint=f"use {_EXAMPLES}", init_method=init_method)


def _given(init_method: str, query: str) -> dict[str, Any]:
    given: dict[str, Any] = {}
    for name, text in parse_qsl(query, keep_blank_values=True):
        if name not in ("rank", "world_size") or not text.isdigit():
            raise InvalidArgument(
                "an init_method may give rank and world_size, both numbers",
                hint="as in 'tcp://10.0.0.1:29500?rank=0&world_size=4'",
                init_method=init_method,
            )
        given[name] = int(text)
    if given:
        # Nodes and local ranks of the launcher no longer fit ranks that are given by hand.
        given.update(source=f"init_method {init_method}", local_rank=None, local_world_size=None, node_rank=None)
    return given


def _address(init_method: str) -> tuple[str, int]:
    parts = urlsplit(init_method)
    try:
        host, port = parts.hostname, parts.port
    except ValueError:
        host = port = None
    if host is None or not port:
        raise InvalidArgument("the address needs a host and a port", hint=f"use {_EXAMPLES}", init_method=init_method)
    return host, port


def _file_store(init_method: str, netloc: str, path: Path, world_size: int) -> dist.Store:
    """torch's store in a file, which the last rank to leave removes; refused if another world has met there."""
    if netloc or not path.is_absolute() or path.is_dir() or not path.parent.is_dir():
        raise InvalidArgument(
            "a file:// init_method is the absolute path of a file in a directory that exists",
            hint="as in 'file:///shared/job7', with three slashes",
            init_method=init_method,
        )
    store = dist.FileStore(str(path), world_size)
    if store.check([_MET]):
        raise ConfigurationError(
            f"another world has met in {path}: it runs, or it was killed and left the file behind",
            hint="give every start a file name of its own, or remove the file if nothing uses it",
            init_method=init_method,
        )
    return store
