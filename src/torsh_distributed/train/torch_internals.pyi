# Computes with a tensor of our own class as with a plain one.
from torch._C import DisableTorchFunctionSubclass as DisableTorchFunctionSubclass

# The group of a functional collective, which is given by name.
from torch.distributed.distributed_c10d import _resolve_process_group as _resolve_process_group

MEMBERS: dict[str, str]
