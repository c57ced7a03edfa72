from torsh_distributed.parallel.data.bucket_clock import OverlapStats as OverlapStats
from torsh_distributed.parallel.data.bucket_size import auto_bucket as auto_bucket
from torsh_distributed.parallel.data.ddp import DistributedDataParallel as DistributedDataParallel
from torsh_distributed.parallel.data.ddp import GradientSyncStats as GradientSyncStats
from torsh_distributed.parallel.data.gradient_check import GradientDifference as GradientDifference
from torsh_distributed.parallel.data.gradient_sync import BucketInfo as BucketInfo
