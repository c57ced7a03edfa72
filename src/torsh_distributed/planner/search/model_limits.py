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
    _known: dict[tuple[int, int, int], str | None] = field(default_factory=dict)

    def refusal(self, plan: Plan) -> str | None:
        """Why the model cannot be split as the plan says, in one sentence; None if it can."""
        mesh = plan.mesh
        key = (mesh.tp, mesh.ep, mesh.pp)
        if key not in self._known:
            self._known[key] = self._asked(plan)
        return self._known[key]

    def _asked(self, plan: Plan) -> str | None:
        mesh = plan.mesh
        try:
            if mesh.tp > 1:
                self._tensor_plan(mesh.tp)
            check_experts(self.model, plan)
            if mesh.pp > 1 and anatomy_of(self.model).is_encoder_decoder:
                return "the blocks of an encoder and a decoder are not one chain, so they make no pipeline"
        except (ConfigurationError, InvalidArgument) as error:
            return error.message.splitlines()[0]
        return None

    @functools.cache  # noqa: B019 (it lives as long as one search)
    def _tensor_plan(self, tp: int) -> None:
        find_tensor_plan(self.model, tp=tp)
