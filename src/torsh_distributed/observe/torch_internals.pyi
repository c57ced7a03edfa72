# Counts operators; documented by torch, and public nowhere.
from torch.utils._python_dispatch import TorchDispatchMode as TorchDispatchMode

MEMBERS: dict[str, str]
