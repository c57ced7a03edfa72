"""Remote calls: functions of other processes, by name, and references to their objects.

`rpc_worker` is a process that calls and is called, `current_worker` the one of this process. A call goes from `calling`
through `messages` to `serving`; `references` are objects that stay where they are.
"""

from torsh_distributed.lazy import exports as _exports

__all__, __getattr__, __dir__ = _exports(__name__)
