"""A parameter server: parameters on one or several processes, trained by workers that come and go.

`parameter_client` is a worker's side; it calls `parameter_service`, which a `parameter_server` offers. There
`push_rounds` says who waits for whom, `shard` applies gradients, and `kept_tensors` keeps everything through a SIGKILL.
"""

from torsh_distributed.lazy import exports as _exports

__all__, __getattr__, __dir__ = _exports(__name__)
