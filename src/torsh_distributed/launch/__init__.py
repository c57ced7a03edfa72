"""Start and supervise the processes of a job. Read `spec`, then `job` (what `torsh run` calls), `nodes`, `local`, and
`worker`, the code that runs in the workers."""

from torsh_distributed.lazy import exports as _exports

__all__, __getattr__, __dir__ = _exports(__name__)
