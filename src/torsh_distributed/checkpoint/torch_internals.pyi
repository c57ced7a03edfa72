# What torch.load calls for a tensor: written into files that it reads.
from torch._utils import _rebuild_tensor_v2 as _rebuild_tensor_v2
from torch._utils import _rebuild_tensor_v3 as _rebuild_tensor_v3

# Where a tensor lies, in the metadata that torch.distributed.checkpoint reads.
from torch.distributed.checkpoint.filesystem import _StorageInfo as _StorageInfo

# The names of storages in files of torch.save.
from torch.storage import _dtype_to_storage_type_map as _dtype_to_storage_type_map
