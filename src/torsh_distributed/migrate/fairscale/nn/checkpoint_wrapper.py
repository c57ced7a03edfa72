"""FairScale's checkpoint_wrapper: backward recomputes a module instead of keeping its activations."""

from __future__ import annotations

from torch import nn

from torsh_distributed.parallel.activation import checkpoint_activations
from torsh_distributed.plan.sections.activation import ActivationConfig


def checkpoint_wrapper(
    module: nn.Module, offload_to_cpu: bool = False, maintain_forward_counter: bool = False
) -> nn.Module:
    """The same module, changed in place: its names and parameters stay, its forward runs again in backward.

    `offload_to_cpu` keeps its inputs in host memory meanwhile. `maintain_forward_counter` has no effect: modules that
    count their calls are restored after the second forward, as all buffers are.
    """
    config = ActivationConfig(strategy="uniform", every_n_layers=1, offload_to_cpu=offload_to_cpu)
    checkpoint_activations(module, config, layers={"": module})
    return module
