"""Notices that parameters are frozen or unfrozen while a model trains whose strategy was built for those it had."""

from __future__ import annotations

from torch import nn

from torsh_distributed.errors import InvalidArgument


class TrainedParams:
    """Which parameters were trained when the Engine was made, on this rank.

    Their gradients are averaged by lists that are made once: each rank would update an unfrozen parameter with its own
    gradient, and replicas would drift apart without an error.
    """

    def __init__(self, model: nn.Module) -> None:
        self._was = [(name, param, param.requires_grad) for name, param in model.named_parameters()]

    def check(self) -> None:
        """Before an update: raise if another parameter is trained now."""
        changed = [name for name, param, was in self._was if param.requires_grad is not was]
        if changed:
            shown = ", ".join(changed[:3]) + (" …" if len(changed) > 3 else "")
            raise InvalidArgument(
                f"requires_grad of {shown} was changed after parallelize()",
                hint="save, build the model as it is to be trained, call parallelize() again and load; mesh.dp and"
                " mesh.shard alone take such changes between steps",
                changed=changed,
            )
