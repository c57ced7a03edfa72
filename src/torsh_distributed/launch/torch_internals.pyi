# NVML counts all GPUs, torch those of CUDA_VISIBLE_DEVICES.
from torch.cuda import _get_nvml_device_index as _get_nvml_device_index

MEMBERS: dict[str, str]
