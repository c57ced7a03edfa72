"""Jobs on other people's machines: one interface over Ray, Dask, SLURM, SSH, MPI and Kubernetes.

A `Submission` says what runs and what it needs; a `ClusterEngine` submits it, tells its state, shows its logs, cancels
and scales it. Each engine is a room of its own that nothing else imports, so that none is needed for the others.
"""

from torsh_distributed.lazy import exports as _exports

__all__, __getattr__, __dir__ = _exports(__name__)
