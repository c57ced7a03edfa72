"""The sections of a plan and their defaults: what checks and tables about a plan read."""

from __future__ import annotations

from typing import TypedDict

from torsh_distributed.plan.section import Section
from torsh_distributed.plan.sections.compress import CompressConfig
from torsh_distributed.plan.sections.data import DdpConfig, FsdpConfig
from torsh_distributed.plan.sections.distributed import DistributedConfig
from torsh_distributed.plan.sections.expert import ExpertConfig
from torsh_distributed.plan.sections.green import GreenConfig
from torsh_distributed.plan.sections.mesh import ContextConfig, MeshConfig, PipelineConfig, TensorConfig
from torsh_distributed.plan.sections.observe import ObserveConfig
from torsh_distributed.plan.sections.offload import OffloadConfig
from torsh_distributed.plan.sections.recovery import CheckpointConfig, ElasticConfig, RecoveryConfig, RetryConfig
from torsh_distributed.plan.sections.server import ServerConfig
from torsh_distributed.plan.sections.training import ActivationConfig, CompileConfig, PrecisionConfig, TrainingConfig


class PlanArguments(TypedDict, total=False):
    """What `Plan(...)` takes: sections, and the degrees of [mesh] as a short form."""

    mesh: MeshConfig
    distributed: DistributedConfig
    ddp: DdpConfig
    fsdp: FsdpConfig
    tensor: TensorConfig
    pipeline: PipelineConfig
    context: ContextConfig
    expert: ExpertConfig
    offload: OffloadConfig
    activation: ActivationConfig
    compile: CompileConfig
    compress: CompressConfig
    precision: PrecisionConfig
    training: TrainingConfig
    checkpoint: CheckpointConfig
    elastic: ElasticConfig
    recovery: RecoveryConfig
    retry: RetryConfig
    observe: ObserveConfig
    green: GreenConfig
    server: ServerConfig
    dp: int
    shard: int
    tp: int
    pp: int
    ep: int
    cp: int


class PlanSections(Section):
    """The values of a plan. `Plan` adds where they come from, what they mean together and whether they can run."""

    mesh: MeshConfig = MeshConfig()
    """The degree of each axis of the mesh."""

    distributed: DistributedConfig = DistributedConfig()
    """The backend and its deadline."""

    ddp: DdpConfig = DdpConfig()
    """How gradients are averaged over replicas."""

    fsdp: FsdpConfig = FsdpConfig()
    """How state is sharded."""

    tensor: TensorConfig = TensorConfig()
    """How layers are split."""

    pipeline: PipelineConfig = PipelineConfig()
    """How layers become stages."""

    context: ContextConfig = ContextConfig()
    """How attention runs over split sequences."""

    expert: ExpertConfig = ExpertConfig()
    """How tokens find experts."""

    offload: OffloadConfig = OffloadConfig()
    """What leaves the device's memory."""

    activation: ActivationConfig = ActivationConfig()
    """Which activations are recomputed."""

    compile: CompileConfig = CompileConfig()
    """What torch.compile makes one graph of."""

    compress: CompressConfig = CompressConfig()
    """How gradients are made smaller."""

    precision: PrecisionConfig = PrecisionConfig()
    """Which number formats are used."""

    training: TrainingConfig = TrainingConfig()
    """Steps, batch, learning rate."""

    checkpoint: CheckpointConfig = CheckpointConfig()
    """When training state is kept."""

    elastic: ElasticConfig = ElasticConfig()
    """How a run survives lost ranks."""

    recovery: RecoveryConfig = RecoveryConfig()
    """What training does about its own failures."""

    retry: RetryConfig = RetryConfig()
    """How failed operations are tried again."""

    observe: ObserveConfig = ObserveConfig()
    """Where events and metrics go."""

    green: GreenConfig = GreenConfig()
    """What the run costs in energy."""

    server: ServerConfig = ServerConfig()
    """Whether ranks train through parameter servers."""

    def value(self, key: str) -> object:
        """The value under a full key such as `mesh.dp`."""
        section, _, name = key.partition(".")
        return getattr(getattr(self, section), name)


DEFAULTS = PlanSections()
"""Every key at its default."""
