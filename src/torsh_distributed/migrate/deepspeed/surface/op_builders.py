"""`deepspeed.ops.op_builder`: the builders of DeepSpeed's compiled code, of which nothing is compiled here.

Scripts ask whether an operation is there before they use it: `CPUAdamBuilder().is_compatible()`.
"""

from __future__ import annotations

from typing import Any, NoReturn

import torch

from torsh_distributed.errors import FeatureNotAvailable

_THERE = {
    "CPUAdamBuilder": "deepspeed.ops.adam.DeepSpeedCPUAdam",
    "FusedAdamBuilder": "deepspeed.ops.adam.FusedAdam",
    "CPUAdagradBuilder": "deepspeed.ops.adagrad.DeepSpeedCPUAdagrad",
    "CPULionBuilder": "deepspeed.ops.lion.DeepSpeedCPULion",
    "FusedLionBuilder": "deepspeed.ops.lion.FusedLion",
    "FusedLambBuilder": "deepspeed.ops.lamb.FusedLamb",
}
"""Builders whose operation is here, on torch's kernels and ours, with the class that does it."""
_ABSENT = (
    "AsyncIOBuilder",
    "GDSBuilder",
    "UtilsBuilder",
    "InferenceBuilder",
    "TransformerBuilder",
    "StochasticTransformerBuilder",
    "QuantizerBuilder",
    "FPQuantizerBuilder",
    "RandomLTDBuilder",
    "SparseAttnBuilder",
    "SpatialInferenceBuilder",
    "EvoformerAttnBuilder",
    "RaggedOpsBuilder",
    "RaggedUtilsBuilder",
    "InferenceCoreBuilder",
    "InferenceCutlassBuilder",
    "CCLCommBuilder",
    "ShareMemCommBuilder",
    "DeepCompileBuilder",
)


class OpBuilder:
    """A builder; `name` is that of its class in DeepSpeed."""

    name = "OpBuilder"

    def is_compatible(self, verbose: bool = False) -> bool:
        """Whether the operation is here."""
        return self.name in _THERE

    def compatible_ops(self) -> list[str]:
        """The operations that are here."""
        return list(_THERE)

    @staticmethod
    def is_rocm_pytorch() -> bool:
        """Whether torch is built for AMD's GPUs."""
        return torch.version.hip is not None

    def load(self, verbose: bool = True) -> NoReturn:
        """Refuse: there is no compiled module to return."""
        instead = _THERE.get(self.name)
        raise FeatureNotAvailable(
            f"{self.name}.load(): nothing of DeepSpeed is compiled here",
            hint=f"use {instead}, which needs none of it" if instead else "leave the operation out",
        )

    jit_load = load


BUILDERS: dict[str, type[OpBuilder]] = {
    name: type(name, (OpBuilder,), {"name": name, "__doc__": f"{name} of DeepSpeed."}) for name in (*_THERE, *_ABSENT)
}
"""Every builder by its name."""


def builder_names() -> dict[str, Any]:
    """What the module has."""
    by_operation = {name.removesuffix("Builder").lower(): kind() for name, kind in BUILDERS.items()}
    return {**BUILDERS, "OpBuilder": OpBuilder, "ALL_OPS": by_operation}
