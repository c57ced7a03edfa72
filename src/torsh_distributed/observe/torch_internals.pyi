# What DTensor finds out placements with: no work of the model.
from torch._subclasses.fake_tensor import FakeTensor as FakeTensor

# Counts operators; documented by torch, and public nowhere.
from torch.utils._python_dispatch import TorchDispatchMode as TorchDispatchMode

MEMBERS: dict[str, str]
