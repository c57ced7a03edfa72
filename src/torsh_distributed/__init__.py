"""Distributed training for PyTorch: one `Plan` from a laptop to a cluster, on real backends."""

from importlib.metadata import version as _version

__version__ = _version("torsh-distributed")
