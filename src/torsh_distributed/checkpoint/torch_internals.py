"""Private names of torch that `checkpoint` uses: those of modules in the stub, members of torch's objects below.

Names of the stub are imported on first use. `tests/test_torch_internals.py` has a case for each, with its signature, so
a torch that changed one fails there; no other module of this layer may name a private part of torch.
"""

from __future__ import annotations

from torsh_distributed.lazy import exports as _exports

__all__, __getattr__, __dir__ = _exports(__name__)
