"""The arguments of FairScale's FullyShardedDataParallel: what each means on FSDP2, with a verdict."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Self

import torch

from torsh_distributed.errors import FeatureNotAvailable, InvalidArgument
from torsh_distributed.migrate.report import KeyVerdict, MigrationReport, Verdict, unknown_key

KNOWN: dict[str, tuple[Verdict, str, str]] = {
    "process_group": (Verdict.HONOURED, "the ranks of mesh.shard", ""),
    "process_group_reduce_scatter": (Verdict.HINT, "", "gradients and parameters use one group; FSDP2 overlaps them"),
    "reshard_after_forward": (Verdict.HONOURED, "fsdp.strategy full_shard, or shard_grad_op", ""),
    "disable_reshard_on_root": (Verdict.HONOURED, "the outermost piece stays gathered for backward", ""),
    "mixed_precision": (Verdict.HONOURED, "precision.dtype", ""),
    "fp32_reduce_scatter": (Verdict.HONOURED, "precision.reduce_dtype = fp32", ""),
    "flatten_parameters": (Verdict.EQUIVALENT, "", "FSDP2 shards each parameter by rows and sends a piece as one"),
    "move_params_to_cpu": (Verdict.HONOURED, "FSDP2's CPUOffloadPolicy", ""),
    "cpu_offload": (Verdict.HONOURED, "FSDP2's CPUOffloadPolicy", "the old name of move_params_to_cpu"),
    "move_grads_to_cpu": (Verdict.EQUIVALENT, "", "gradients are where their parameters are"),
    "compute_dtype": (Verdict.HONOURED, "precision.dtype", ""),
    "buffer_dtype": (Verdict.HONOURED, "precision.buffer_dtype", ""),
    "bucket_cap_mb": (Verdict.HINT, "", "FSDP2 sends the gradients of a piece as one"),
    "compute_device": (Verdict.HONOURED, "the device of the module", ""),
    "no_broadcast_optim_state": (Verdict.EQUIVALENT, "", "state is gathered by whole_optimizer_state"),
    "state_dict_device": (Verdict.HONOURED, "the device of state_dict()'s tensors", ""),
    "clear_autocast_cache": (Verdict.HINT, "", "FSDP2 casts parameters itself; no cast of them is cached"),
    "force_input_to_fp32": (Verdict.HONOURED, "inputs are cast before the module", ""),
    "verbose": (Verdict.HINT, "", "print the module"),
    "state_dict_on_rank_0_only": (Verdict.HONOURED, "state_dict() is empty on other ranks", ""),
    "gradient_predivide_factor": (Verdict.EQUIVALENT, "", "gradients are means either way; FSDP2 divides in two parts"),
    "allow_reset_parameters": (Verdict.EQUIVALENT, "", "reset_parameters() works inside summon_full_params()"),
    "offload_config": (Verdict.REFUSED, "", "write [offload] with a disk_dir in a plan for td.parallelize"),
    "ssd_offload": (Verdict.REFUSED, "", "write [offload] with a disk_dir in a plan for td.parallelize"),
}
"""Every argument but the module, with its verdict, what it is here and why."""

_NO_VALUE = (None, False)


@dataclass(frozen=True, kw_only=True)
class FairscaleFsdpArguments:
    """What of the arguments has an effect, checked."""

    reshard_after_forward: bool = True
    disable_reshard_on_root: bool = True
    mixed_precision: bool = False
    fp32_reduce_scatter: bool = False
    compute_dtype: torch.dtype | None = None
    buffer_dtype: torch.dtype | None = None
    keeps_params_on_cpu: bool = False
    compute_device: torch.device | str | None = None
    state_dict_device: torch.device | str | None = None
    force_input_to_fp32: bool = False
    state_dict_on_rank_0_only: bool = False

    @classmethod
    def from_keywords(cls, keywords: Mapping[str, Any]) -> Self:
        """Raise InvalidArgument for a name FairScale does not have, FeatureNotAvailable for one refused here."""
        for name, value in keywords.items():
            if name not in KNOWN:
                problem = unknown_key(name, KNOWN, kind="fairscale")
                raise InvalidArgument(
                    f"FullyShardedDataParallel has no argument {name}", hint=problem.hint, **{name: value}
                )
            verdict, _, reason = KNOWN[name]
            if verdict is Verdict.REFUSED and value not in _NO_VALUE:
                raise FeatureNotAvailable(f"FullyShardedDataParallel({name}=…) is not supported", hint=reason)
        offloads = bool(keywords.get("move_params_to_cpu") or keywords.get("cpu_offload"))
        if keywords.get("fp32_reduce_scatter") and not keywords.get("mixed_precision"):
            raise InvalidArgument(
                "fp32_reduce_scatter needs mixed_precision: gradients are float32 otherwise",
                hint="set mixed_precision=True, or leave fp32_reduce_scatter out",
            )
        if keywords.get("move_grads_to_cpu") is False and offloads:
            raise FeatureNotAvailable(
                "move_grads_to_cpu=False beside move_params_to_cpu is not supported",
                hint="leave it out: FSDP2 keeps gradients where their parameters are",
            )
        own = {name: value for name, value in keywords.items() if name in cls.__dataclass_fields__}
        return cls(keeps_params_on_cpu=offloads, **own)

    @property
    def reshards(self) -> bool | None:
        """FSDP2's reshard_after_forward; None leaves the outermost module gathered."""
        if not self.reshard_after_forward:
            return False
        return None if self.disable_reshard_on_root else True

    @property
    def param_dtype(self) -> torch.dtype | None:
        """The format of computation; None keeps the parameters'."""
        if self.mixed_precision:
            return self.compute_dtype or torch.float16
        return None if self.compute_dtype in (None, torch.float32) else self.compute_dtype

    @property
    def reduce_dtype(self) -> torch.dtype | None:
        """The format of summed gradients; None keeps the gradients'."""
        return torch.float32 if self.fp32_reduce_scatter else None


def fsdp_verdicts(keywords: Mapping[str, Any]) -> MigrationReport:
    """A verdict on every argument of a FullyShardedDataParallel."""
    entries = []
    for name, value in keywords.items():
        if name not in KNOWN:
            problem = unknown_key(name, KNOWN, kind="fairscale")
            raise InvalidArgument(f"FullyShardedDataParallel has no argument {name}", hint=problem.hint)
        verdict, means, reason = KNOWN[name]
        entries.append(KeyVerdict(name, value, verdict, means, reason))
    return MigrationReport("fairscale", tuple(entries))
