# Our groups appear in torch's profiles; its own do it in C++, which Python cannot reach.
from torch._C._profiler import _RecordFunctionFast as _RecordFunctionFast

# Whether a profiler runs in this thread.
from torch.autograd import _profiler_enabled as _profiler_enabled

# Changes the deadline of a group of torch's.
from torch.distributed.distributed_c10d import _set_pg_timeout as _set_pg_timeout

# Extended, so that a script sees its own groups only.
from torch.distributed.distributed_c10d import _World as _World

# The groups of this process: all of them are aborted or taken down together.
from torch.distributed.distributed_c10d import _world as _world

MEMBERS: dict[str, str]
