"""What the user asked for: `Plan` and its sections."""

from torsh_distributed.plan.activation import ActivationConfig
from torsh_distributed.plan.checkpoint import CheckpointConfig
from torsh_distributed.plan.compression import CompressionConfig
from torsh_distributed.plan.ddp import BucketConfig
from torsh_distributed.plan.distributed import DistributedConfig
from torsh_distributed.plan.elastic import ElasticConfig
from torsh_distributed.plan.expert import ExpertParallelismConfig
from torsh_distributed.plan.explanation import Explanation
from torsh_distributed.plan.fsdp import FsdpConfig
from torsh_distributed.plan.mesh import MeshConfig
from torsh_distributed.plan.observe import ObserveConfig
from torsh_distributed.plan.offload import OffloadConfig
from torsh_distributed.plan.pipeline import PipelineConfig
from torsh_distributed.plan.plan import Difference, Plan
from torsh_distributed.plan.precision import MixedPrecisionConfig
from torsh_distributed.plan.retry import RetryPolicy
from torsh_distributed.plan.tensor import TensorParallelConfig
from torsh_distributed.plan.training import TrainingConfig

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
