"""`hvd.elastic`: `elastic_run` repeats training from the last commit of an `elastic_state` after a failure."""

from torsh_distributed.lazy import exports as _exports

__all__, __getattr__, __dir__ = _exports(__name__)
