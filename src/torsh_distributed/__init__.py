"""Distributed training for PyTorch: one `Plan` from a laptop to a cluster, on real backends.

The names are in `__init__.pyi`; each is imported when it is first used.

Importing starts nothing and opens nothing. It does one thing: torch learns the names of our backends, so
`torch.distributed.init_process_group("shm")` works in a plain torch script. For this three of torch's functions are
wrapped, once `torch.distributed` is imported: its `env://` rendezvous (asks MPI for the rank under mpiexec), the one
that opens a rendezvous' TCPStore (asks for the job's secret under `torsh run`), and that of monitored barriers (takes
our groups). Each calls torch's own in all other cases.
"""

from torsh_distributed.comm.backends.registry import announce_backends as _announce_backends
from torsh_distributed.lazy import exports as _exports

__all__, _get, __dir__ = _exports(__name__)
__all__ += ["__version__"]

_announce_backends()


def __getattr__(name: str) -> object:
    """A name of the stub, or the version, which takes a search through the installed packages."""
    if name == "__version__":
        from importlib.metadata import version

        return version("torsh-distributed")
    return _get(name)
