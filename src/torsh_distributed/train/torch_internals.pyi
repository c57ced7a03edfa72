# Computes with a tensor of our own class as with a plain one.
from torch._C import DisableTorchFunctionSubclass as DisableTorchFunctionSubclass

MEMBERS: dict[str, str]
