"""Starting and supervising the processes of a job: `job` is what `torsh run` calls, `worker` the other side."""

from torsh_distributed.lazy import exports as _exports

__all__, __getattr__, __dir__ = _exports(__name__)
