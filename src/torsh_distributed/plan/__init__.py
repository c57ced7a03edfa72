"""What the user asked for: `Plan` and its sections."""

from torsh_distributed.plan.describing.explanation import Explanation
from torsh_distributed.plan.plan import Difference, Plan
from torsh_distributed.plan.sections.activation import ActivationConfig
from torsh_distributed.plan.sections.axes.ddp import BucketConfig
from torsh_distributed.plan.sections.axes.expert import ExpertParallelismConfig
from torsh_distributed.plan.sections.axes.fsdp import FsdpConfig
from torsh_distributed.plan.sections.axes.mesh import MeshConfig
from torsh_distributed.plan.sections.axes.pipeline import PipelineConfig
from torsh_distributed.plan.sections.axes.tensor import TensorParallelConfig
from torsh_distributed.plan.sections.checkpoint import CheckpointConfig
from torsh_distributed.plan.sections.compress import CompressionConfig
from torsh_distributed.plan.sections.distributed import DistributedConfig
from torsh_distributed.plan.sections.elastic import ElasticConfig
from torsh_distributed.plan.sections.observe import ObserveConfig
from torsh_distributed.plan.sections.offload import OffloadConfig
from torsh_distributed.plan.sections.precision import MixedPrecisionConfig
from torsh_distributed.plan.sections.retry import RetryPolicy
from torsh_distributed.plan.sections.training import TrainingConfig

__all__ = [
    "ActivationConfig",
    "BucketConfig",
    "CheckpointConfig",
    "CompressionConfig",
    "Difference",
    "DistributedConfig",
    "ElasticConfig",
    "ExpertParallelismConfig",
    "Explanation",
    "FsdpConfig",
    "MeshConfig",
    "MixedPrecisionConfig",
    "ObserveConfig",
    "OffloadConfig",
    "PipelineConfig",
    "Plan",
    "RetryPolicy",
    "TensorParallelConfig",
    "TrainingConfig",
]
