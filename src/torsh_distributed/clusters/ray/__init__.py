"""Ray: ranks as actors of a placement group, and the way into Ray Train, Tune, Data and Serve.

Read `actor_pool` (a function on workers, and how actors host ranks); `ray_engine` submits scripts.
"""

from torsh_distributed.lazy import exports as _exports

__all__, __getattr__, __dir__ = _exports(__name__)
