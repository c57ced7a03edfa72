"""Notices that other parameters are trained than those that a strategy was built for."""

from __future__ import annotations

from torch import nn
from torch.optim import Optimizer

from torsh_distributed.errors import InvalidArgument


class TrainedParams:
    """Which parameters a model and its optimizer had, and which were trained, when the Engine was made on this rank.

    Gradients are averaged by lists that are made once: each rank would update any other parameter with its own
    gradient, and replicas would drift apart without an error. With `follows_freezing` the strategy itself sees what is
    unfrozen.
    """

    def __init__(self, model: nn.Module, optimizer: Optimizer, *, follows_freezing: bool) -> None:
        self._optimizer = optimizer
        named = [] if follows_freezing else model.named_parameters()
        self._was = [(name, param, param.requires_grad) for name, param in named]
        self._known = {id(param) for param in (*model.parameters(), *self._updated())}
        self._num_updated = len(self._updated())

    def check(self) -> None:
        """Before an update: raise if a parameter is trained now that the strategy does not average."""
        changed = [name for name, param, was in self._was if param.requires_grad is not was]
        if changed:
            shown = ", ".join(changed[:3]) + (" …" if len(changed) > 3 else "")
            raise InvalidArgument(
                f"requires_grad of {shown} was changed after parallelize()",
                hint="save, build the model as it is to be trained, call parallelize() again and load; mesh.dp and"
                " mesh.shard alone take such changes between steps",
                changed=changed,
            )
        if sum(len(group["params"]) for group in self._optimizer.param_groups) == self._num_updated:
            return
        updated = self._updated()
        unknown = [tuple(param.shape) for param in updated if id(param) not in self._known]
        if unknown:
            raise InvalidArgument(
                f"the optimizer got a parameter of shape {unknown[0]} that the model did not have in parallelize()",
                hint="change the model first, then call parallelize(): gradients of later parameters are not averaged",
                shapes=unknown,
            )
        self._num_updated = len(updated)

    def _updated(self) -> list[nn.Parameter]:
        return [param for group in self._optimizer.param_groups for param in group["params"]]
