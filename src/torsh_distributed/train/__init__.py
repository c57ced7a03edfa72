"""Training: spread a model over the world with `parallelize`, run its steps with the `Engine`."""

from torsh_distributed.parallel.optim.cpu_adam import CpuAdam
from torsh_distributed.train.assemble import parallelize
from torsh_distributed.train.batch_size import BatchSizeConfig, plan_batch_size
from torsh_distributed.train.efficiency import EfficiencyMeter, EfficiencyReport
from torsh_distributed.train.engine import Engine
from torsh_distributed.train.learning_rate import LearningRate, scale_learning_rate
from torsh_distributed.train.optimizers import AsyncSGD, DistributedOptimizer, ElasticAveragingSGD
from torsh_distributed.train.sampler import DistributedSampler, DistributedSamplerWrapper

__all__ = [
    "AsyncSGD",
    "BatchSizeConfig",
    "CpuAdam",
    "DistributedOptimizer",
    "DistributedSampler",
    "DistributedSamplerWrapper",
    "EfficiencyMeter",
    "EfficiencyReport",
    "ElasticAveragingSGD",
    "Engine",
    "LearningRate",
    "parallelize",
    "plan_batch_size",
    "scale_learning_rate",
]
