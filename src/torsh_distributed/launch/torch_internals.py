"""Private names of torch that `launch` uses: those of modules in the stub, members of torch's objects below.

Names of the stub are imported on first use. `tests/test_torch_internals.py` has a case for each, with its signature, so
a torch that changed one fails there; no other module of this layer may name a private part of torch.
"""

from __future__ import annotations

from torsh_distributed.lazy import exports as _exports

__all__, __getattr__, __dir__ = _exports(__name__)

MEMBERS = {
    "torch._C._distributed_c10d._dump_fr_trace_json|_dump_nccl_trace_json": "torch's flight recorder",
    "torch.distributed.ProcessGroup._get_sequence_number_for_group": "how far a group of torch has come",
    "torch._dynamo": "what every optimizer imports, for the warm spare, which imports by name",
    "torch.distributed.distributed_c10d._world": "the groups of a worker, read without importing torch",
}
"""By path, with the reason: they cannot be imported, or must not be here."""
