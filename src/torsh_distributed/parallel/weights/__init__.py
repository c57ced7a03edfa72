"""Weights in safetensors files: read straight into what each rank holds, and written tensor by tensor.

Read `stored_weights`, then `tensor_files` (what a directory holds) and `weight_names` (which tensor goes where).
"""

from torsh_distributed.lazy import exports as _exports

__all__, __getattr__, __dir__ = _exports(__name__)
