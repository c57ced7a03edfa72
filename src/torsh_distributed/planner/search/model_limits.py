"""What the model alone refuses: degrees of axes that its heads, experts or blocks do not allow."""

from __future__ import annotations

import functools
from dataclasses import dataclass, field

from torch import nn

from torsh_distributed.errors import ConfigurationError, InvalidArgument
from torsh_distributed.parallel.expert.choose import check_experts
from torsh_distributed.parallel.models.anatomy import anatomy_of
from torsh_distributed.parallel.tensor.planning.tensor_plan import find_tensor_plan
from torsh_distributed.plan import Plan


@dataclass(eq=False)
class ModelLimits:
    """Asks the parts that read the model, as `parallelize` would; each question once."""

    model: nn.Module
    _known: dict[tuple[str, int], str | None] = field(default_factory=dict)

    def refusal(self, plan: Plan) -> str | None:
        """Why the model cannot be split as the plan says, in one sentence; None if it can."""
        mesh = plan.mesh
        if mesh.pp > 1 and self._is_encoder_decoder:
            return "the blocks of an encoder and a decoder are not one chain, so they make no pipeline"
        for axis, degree in (("tp", mesh.tp), ("ep", mesh.ep)):
            if degree > 1 or axis == "ep":
                if (axis, degree) not in self._known:
                    self._known[axis, degree] = self._asked(plan, axis)
                found = self._known[axis, degree]
                if found is not None:
                    return found
        return None

    def _asked(self, plan: Plan, axis: str) -> str | None:
        try:
            if axis == "tp":
                find_tensor_plan(self.model, tp=plan.mesh.tp)
            else:
                check_experts(self.model, plan)
        except (ConfigurationError, InvalidArgument) as error:
            return error.message.splitlines()[0]
        return None

    @functools.cached_property
    def _is_encoder_decoder(self) -> bool:
        return anatomy_of(self.model).is_encoder_decoder
