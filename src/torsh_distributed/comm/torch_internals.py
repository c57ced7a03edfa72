"""Private names of torch that `comm` uses: those of modules in the stub, members of torch's objects below.

Names of the stub are imported on first use. `tests/test_torch_internals.py` has a case for each, with its signature, so
a torch that changed one fails there; no other module of this layer may name a private part of torch.
"""

from __future__ import annotations

from torsh_distributed.lazy import exports as _exports

__all__, __getattr__, __dir__ = _exports(__name__)

MEMBERS = {
    "torch.Tensor._nnz": "stored values of a sparse tensor",
    "torch.UntypedStorage._new_using_fd_cpu": "where torch puts memory that it shares",
    "torch.UntypedStorage._share_fd_cpu_": "moves a tensor to memory that others can map",
    "torch.autograd.profiler._is_profiler_enabled": "a flag that changes, so it is looked up in its module each time",
    "torch.distributed.Backend._plugins": "whether our backends are registered",
    "torch.distributed.ProcessGroup._device_types": "the devices of a group",
    "torch.distributed.ProcessGroup._get_backend": "a group's backend, which has its deadline and its abort",
    "torch.distributed.ProcessGroupGloo._Options": "gloo on a chosen interface",
    "torch.distributed.ProcessGroupGloo._Options._devices": "the interface",
    "torch.distributed.ProcessGroupGloo._Options._timeout": "the deadline",
    "torch.distributed.Work._source_rank": "who sent what recv(src=None) received",
    "torch.distributed.rendezvous._create_c10d_store": "wrapped, so that env:// opens the store of `torsh run`",
    "torch.distributed.rendezvous._rendezvous_handlers": "wrapped, so that env:// asks MPI",
    "torch.ops.profiler._call_end_callbacks_on_jit_fut": "ends a mark on another thread",
    "torch.ops.profiler._call_end_callbacks_on_jit_fut._RecordFunction": "its overload for our kind of mark",
    "torch.ops.profiler._record_function_enter_new": "begins a mark that another thread ends",
}
"""By path, with the reason: they cannot be imported, or must not be here."""
