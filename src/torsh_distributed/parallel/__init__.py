"""How a model and its gradients are split over the mesh: `strategy` is the interface, `choose` picks one."""

from torsh_distributed.lazy import exports as _exports

__all__, __getattr__, __dir__ = _exports(__name__)
