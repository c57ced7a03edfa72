"""Training: `parallelize` spreads a model over the world, the `Engine` runs its steps.

Read `assemble`, then `engine`; the other modules are the parts of a step.
"""

from torsh_distributed.lazy import exports as _exports

__all__, __getattr__, __dir__ = _exports(__name__)
