"""Training that survives lost ranks and takes in new ones. Read `in_place`, then `membership_client` (what the launcher
says), `epoch_world` (a new world), `state_transfer` and `state_stream` (how others get the state); `scaling` decides
how many workers there are; `faults` are faults on purpose, `incidents` what went wrong."""

from torsh_distributed.lazy import exports as _exports

__all__, __getattr__, __dir__ = _exports(__name__)
