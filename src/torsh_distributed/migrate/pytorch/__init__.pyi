from torsh_distributed.migrate.pytorch.pytorch_config import PyTorchConfig as PyTorchConfig
from torsh_distributed.migrate.pytorch.pytorch_config import from_torch as from_torch
