from torsh_distributed.migrate.horovod import elastic as elastic
from torsh_distributed.migrate.horovod import mpi_ops as mpi_ops
from torsh_distributed.migrate.horovod.basics import ccl_built as ccl_built
from torsh_distributed.migrate.horovod.basics import cross_rank as cross_rank
from torsh_distributed.migrate.horovod.basics import cross_size as cross_size
from torsh_distributed.migrate.horovod.basics import cuda_built as cuda_built
from torsh_distributed.migrate.horovod.basics import ddl_built as ddl_built
from torsh_distributed.migrate.horovod.basics import gloo_built as gloo_built
from torsh_distributed.migrate.horovod.basics import gloo_enabled as gloo_enabled
from torsh_distributed.migrate.horovod.basics import init as init
from torsh_distributed.migrate.horovod.basics import is_initialized as is_initialized
from torsh_distributed.migrate.horovod.basics import local_rank as local_rank
from torsh_distributed.migrate.horovod.basics import local_size as local_size
from torsh_distributed.migrate.horovod.basics import mpi_built as mpi_built
from torsh_distributed.migrate.horovod.basics import mpi_enabled as mpi_enabled
from torsh_distributed.migrate.horovod.basics import mpi_threads_supported as mpi_threads_supported
from torsh_distributed.migrate.horovod.basics import nccl_built as nccl_built
from torsh_distributed.migrate.horovod.basics import rank as rank
from torsh_distributed.migrate.horovod.basics import rocm_built as rocm_built
from torsh_distributed.migrate.horovod.basics import shutdown as shutdown
from torsh_distributed.migrate.horovod.basics import size as size
from torsh_distributed.migrate.horovod.basics import start_timeline as start_timeline
from torsh_distributed.migrate.horovod.basics import stop_timeline as stop_timeline
from torsh_distributed.migrate.horovod.collectives.async_calls import allgather_async as allgather_async
from torsh_distributed.migrate.horovod.collectives.async_calls import allreduce_async as allreduce_async
from torsh_distributed.migrate.horovod.collectives.async_calls import allreduce_async_ as allreduce_async_
from torsh_distributed.migrate.horovod.collectives.async_calls import alltoall_async as alltoall_async
from torsh_distributed.migrate.horovod.collectives.async_calls import broadcast_async as broadcast_async
from torsh_distributed.migrate.horovod.collectives.async_calls import broadcast_async_ as broadcast_async_
from torsh_distributed.migrate.horovod.collectives.async_calls import grouped_allgather_async as grouped_allgather_async
from torsh_distributed.migrate.horovod.collectives.async_calls import grouped_allreduce_async as grouped_allreduce_async
from torsh_distributed.migrate.horovod.collectives.async_calls import (
    grouped_allreduce_async_ as grouped_allreduce_async_,
)
from torsh_distributed.migrate.horovod.collectives.async_calls import (
    grouped_reducescatter_async as grouped_reducescatter_async,
)
from torsh_distributed.migrate.horovod.collectives.async_calls import reducescatter_async as reducescatter_async
from torsh_distributed.migrate.horovod.collectives.horovod_compression import Compression as Compression
from torsh_distributed.migrate.horovod.collectives.object_calls import allgather_object as allgather_object
from torsh_distributed.migrate.horovod.collectives.object_calls import broadcast_object as broadcast_object
from torsh_distributed.migrate.horovod.collectives.reduction_names import Adasum as Adasum
from torsh_distributed.migrate.horovod.collectives.reduction_names import Average as Average
from torsh_distributed.migrate.horovod.collectives.reduction_names import Max as Max
from torsh_distributed.migrate.horovod.collectives.reduction_names import Min as Min
from torsh_distributed.migrate.horovod.collectives.reduction_names import Product as Product
from torsh_distributed.migrate.horovod.collectives.reduction_names import Sum as Sum
from torsh_distributed.migrate.horovod.collectives.sparse_calls import sparse_allreduce_async as sparse_allreduce_async
from torsh_distributed.migrate.horovod.collectives.state_broadcast import (
    broadcast_optimizer_state as broadcast_optimizer_state,
)
from torsh_distributed.migrate.horovod.collectives.state_broadcast import broadcast_parameters as broadcast_parameters
from torsh_distributed.migrate.horovod.collectives.submission import poll as poll
from torsh_distributed.migrate.horovod.collectives.submission import synchronize as synchronize
from torsh_distributed.migrate.horovod.collectives.sync_calls import allgather as allgather
from torsh_distributed.migrate.horovod.collectives.sync_calls import allreduce as allreduce
from torsh_distributed.migrate.horovod.collectives.sync_calls import allreduce_ as allreduce_
from torsh_distributed.migrate.horovod.collectives.sync_calls import alltoall as alltoall
from torsh_distributed.migrate.horovod.collectives.sync_calls import broadcast as broadcast
from torsh_distributed.migrate.horovod.collectives.sync_calls import broadcast_ as broadcast_
from torsh_distributed.migrate.horovod.collectives.sync_calls import grouped_allgather as grouped_allgather
from torsh_distributed.migrate.horovod.collectives.sync_calls import grouped_allreduce as grouped_allreduce
from torsh_distributed.migrate.horovod.collectives.sync_calls import grouped_allreduce_ as grouped_allreduce_
from torsh_distributed.migrate.horovod.collectives.sync_calls import grouped_reducescatter as grouped_reducescatter
from torsh_distributed.migrate.horovod.collectives.sync_calls import reducescatter as reducescatter
from torsh_distributed.migrate.horovod.collectives.waiting_calls import barrier as barrier
from torsh_distributed.migrate.horovod.collectives.waiting_calls import join as join
from torsh_distributed.migrate.horovod.horovod_errors import HorovodInternalError as HorovodInternalError
from torsh_distributed.migrate.horovod.horovod_errors import HostsUpdatedInterrupt as HostsUpdatedInterrupt
from torsh_distributed.migrate.horovod.launching.function_run import run as run
from torsh_distributed.migrate.horovod.process_sets import ProcessSet as ProcessSet
from torsh_distributed.migrate.horovod.process_sets import add_process_set as add_process_set
from torsh_distributed.migrate.horovod.process_sets import global_process_set as global_process_set
from torsh_distributed.migrate.horovod.process_sets import remove_process_set as remove_process_set
from torsh_distributed.migrate.horovod.training.horovod_optimizer import DistributedOptimizer as DistributedOptimizer
from torsh_distributed.migrate.horovod.training.sync_batch_norm import SyncBatchNorm as SyncBatchNorm
