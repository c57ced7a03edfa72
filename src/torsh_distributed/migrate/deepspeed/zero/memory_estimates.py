"""Estimates of the memory that a model's training state takes: parameters, gradients, optimizer; not activations."""

from __future__ import annotations

from torch import nn

_GB = 2**30


def estimated_bytes(
    total_params: int,
    largest_layer_params: int,
    num_gpus: int,
    *,
    stage: int,
    cpu_offload: bool = False,
    cpu_offload_params: bool = False,
) -> tuple[int, int]:
    """Bytes on each GPU, and in host memory over all of them, in a 16-bit format with fp32 Adam.

    A parameter has 2 bytes itself, 2 for its gradient, and 12 for its master and both moments.
    """
    params, grads, state = 2 * total_params, 2 * total_params, 12 * total_params
    if stage == 3:
        gathered = 4 * largest_layer_params
        if cpu_offload and cpu_offload_params:
            return gathered, params + grads + state
        if cpu_offload:
            return gathered + params // num_gpus, grads + state
        return gathered + (params + grads + state) // num_gpus, 0
    if cpu_offload:
        return params, grads + state
    return params + (grads + state) // num_gpus, 0


def _sizes(model: nn.Module) -> tuple[int, int]:
    total = sum({id(param): param.numel() for param in model.parameters()}.values())
    largest = max(
        (sum(one.numel() for one in module.parameters(recurse=False)) for module in model.modules()), default=0
    )
    return total, largest


def estimate_zero3_model_states_mem_needs(
    total_params: int,
    largest_layer_params: int,
    num_gpus_per_node: int = 1,
    num_nodes: int = 1,
    cpu_offload: bool = True,
    cpu_offload_params: bool = True,
    zero_init: bool = True,
    additional_buffer_factor: float = 1.5,
) -> tuple[int, int, int]:
    """Bytes in host memory, on each GPU, and of the largest layer, for stage 3."""
    num_gpus = num_gpus_per_node * num_nodes
    device, host = estimated_bytes(
        total_params,
        largest_layer_params,
        num_gpus,
        stage=3,
        cpu_offload=cpu_offload,
        cpu_offload_params=cpu_offload_params,
    )
    # Before it is sharded, every rank builds the model.
    building = 4 * total_params * num_gpus_per_node
    return int(max(host / num_nodes, building) * additional_buffer_factor), device, 4 * largest_layer_params


def estimate_zero2_model_states_mem_needs(
    total_params: int,
    num_gpus_per_node: int = 1,
    num_nodes: int = 1,
    cpu_offload: bool = True,
    additional_buffer_factor: float = 1.5,
) -> tuple[int, int]:
    """Bytes in host memory and on each GPU, for stages 1 and 2."""
    num_gpus = num_gpus_per_node * num_nodes
    device, host = estimated_bytes(total_params, 0, num_gpus, stage=2, cpu_offload=cpu_offload)
    building = 4 * total_params * num_gpus_per_node
    return int(max(host / num_nodes, building) * additional_buffer_factor), device


def estimate_zero3_model_states_mem_needs_all_live(
    model: nn.Module, num_gpus_per_node: int = 1, num_nodes: int = 1, additional_buffer_factor: float = 1.5
) -> None:
    """Print the estimates for stage 3 with every kind of offload."""
    total, largest = _sizes(model)
    estimate_zero3_model_states_mem_needs_all_cold(
        total, largest, num_gpus_per_node, num_nodes, additional_buffer_factor
    )


def estimate_zero3_model_states_mem_needs_all_cold(
    total_params: int,
    largest_layer_params: int,
    num_gpus_per_node: int = 1,
    num_nodes: int = 1,
    additional_buffer_factor: float = 1.5,
) -> None:
    """As above, from numbers."""
    _print_head(total_params, num_gpus_per_node, num_nodes, largest_layer_params)
    for offload, offload_params in ((True, True), (True, False), (False, False)):
        host, device, _ = estimate_zero3_model_states_mem_needs(
            total_params,
            largest_layer_params,
            num_gpus_per_node,
            num_nodes,
            offload,
            offload_params,
            additional_buffer_factor=additional_buffer_factor,
        )
        where = f"offload_param={'cpu' if offload_params else 'none'}, offload_optimizer={'cpu' if offload else 'none'}"
        print(f"  {host / _GB:7.2f}GB | {device / _GB:6.2f}GB | {where}")


def estimate_zero2_model_states_mem_needs_all_live(
    model: nn.Module, num_gpus_per_node: int = 1, num_nodes: int = 1, additional_buffer_factor: float = 1.5
) -> None:
    """Print the estimates for stages 1 and 2 with and without offload."""
    estimate_zero2_model_states_mem_needs_all_cold(
        _sizes(model)[0], num_gpus_per_node, num_nodes, additional_buffer_factor
    )


def estimate_zero2_model_states_mem_needs_all_cold(
    total_params: int, num_gpus_per_node: int = 1, num_nodes: int = 1, additional_buffer_factor: float = 1.5
) -> None:
    """As above, from numbers."""
    _print_head(total_params, num_gpus_per_node, num_nodes)
    for offload in (True, False):
        host, device = estimate_zero2_model_states_mem_needs(
            total_params, num_gpus_per_node, num_nodes, offload, additional_buffer_factor
        )
        print(f"  {host / _GB:7.2f}GB | {device / _GB:6.2f}GB | offload_optimizer={'cpu' if offload else 'none'}")


def _print_head(total: int, num_gpus: int, num_nodes: int, largest: int | None = None) -> None:
    layer = "" if largest is None else f", {largest / 1e6:.0f}M largest layer params"
    print(
        f"Estimated memory for params, grads and optimizer states: {num_nodes} nodes, {num_gpus} GPUs per node,"
        f" {total / 1e6:.0f}M params{layer}; activations come on top\n  per CPU   |  per GPU |   Options"
    )
