"""Distributed training for PyTorch: one `Plan` from a laptop to a cluster, on real backends.

The names are in `__init__.pyi`; each is imported when it is first used.
"""

from torsh_distributed.comm.backends.registry import announce_backends as _announce_backends
from torsh_distributed.lazy import exports as _exports

__all__, _get, __dir__ = _exports(__name__)
__all__ += ["__version__"]

# The one thing that importing does: torch learns the names of our backends. Nothing is opened or started.
_announce_backends()


def __getattr__(name: str) -> object:
    """A name of the stub, or the version, which takes a search through the installed packages."""
    if name == "__version__":
        from importlib.metadata import version

        return version("torsh-distributed")
    return _get(name)
