"""What the user asked for: `sections` are the keys, `plan.py` is `Plan`, `compatibility` says what goes together.

`reading` is where values come from, `describing` how a plan is explained and documented.
"""

from torsh_distributed.lazy import exports as _exports

__all__, __getattr__, __dir__ = _exports(__name__)
