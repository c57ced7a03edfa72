"""Sharded data parallelism: `module` (ZeRO-2 and 3 on FSDP2), `zero1`, then how both communicate and compress."""

from torsh_distributed.lazy import exports as _exports

__all__, __getattr__, __dir__ = _exports(__name__)
