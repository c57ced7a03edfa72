"""What the user asked for: `Plan`, its `sections`, how it is read (`reading`) and told (`describing`)."""

from torsh_distributed.lazy import exports as _exports

__all__, __getattr__, __dir__ = _exports(__name__)
