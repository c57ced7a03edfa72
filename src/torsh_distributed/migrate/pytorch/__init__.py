"""Keywords of torch's own classes as plans with verdicts: DDP, FSDP1, fully_shard, hooks, scaler, Pipe, settings.

`pytorch_config` reads them all from one dict; the other modules have one table each. None imports torch.
"""

from torsh_distributed.lazy import exports as _exports

__all__, __getattr__, __dir__ = _exports(__name__)
