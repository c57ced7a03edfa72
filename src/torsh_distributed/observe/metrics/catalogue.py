"""Every metric of the library, written once: name, kind, unit, labels and help.

Exports, the dashboard of Grafana, the page and the reference read this table. Names follow Prometheus: a prefix, the
base unit at the end. A counter's name has no `_total`: the formats that want one add it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum

PREFIX = "torsh_"
CUSTOM_PREFIX = "torsh_custom_"


class MetricKind(StrEnum):
    """How values of a metric add up."""

    COUNTER = "counter"
    """A total that grows until the process ends."""
    GAUGE = "gauge"
    """The newest value."""
    DISTRIBUTION = "distribution"
    """Count, sum and buckets of all values; mean, spread and percentiles of the newest."""


class MetricScope(StrEnum):
    """Whom a value is about."""

    RANK = "rank"
    NODE = "node"
    JOB = "job"


@dataclass(frozen=True, slots=True)
class MetricDefinition:
    """What a metric is."""

    name: str
    kind: MetricKind
    unit: str
    """seconds, bytes, ratio, …; empty for counts."""
    help: str
    topic: str
    """The part of the page and of the dashboard where it is shown."""
    labels: tuple[str, ...] = ()
    """Labels besides the rank or the node."""
    scope: MetricScope = MetricScope.RANK


def _table() -> tuple[MetricDefinition, ...]:
    counter, gauge, distribution = MetricKind.COUNTER, MetricKind.GAUGE, MetricKind.DISTRIBUTION
    node, job = MetricScope.NODE, MetricScope.JOB
    define = MetricDefinition
    seconds, size, ratio = "seconds", "bytes", "ratio"
    training = (
        define("torsh_step", gauge, "", "Number of the last optimizer update.", "training"),
        define("torsh_epoch", gauge, "", "Passes over the data that were complete before the last step.", "training"),
        define("torsh_steps", counter, "", "Optimizer updates since this process started.", "training"),
        define("torsh_skipped_steps", counter, "", "Updates skipped because gradients overflowed fp16.", "training"),
        define(
            "torsh_loss",
            gauge,
            "",
            "Mean loss of the last step over all ranks; of a plain loop, this rank's.",
            "training",
        ),
        define("torsh_validation_loss", gauge, "", "Mean loss of the last evaluation over all ranks.", "training"),
        define("torsh_learning_rate", gauge, "", "Learning rate of the last step.", "training"),
        define("torsh_gradient_norm", gauge, "", "Norm of the whole gradient in the last step.", "training"),
        define("torsh_loss_scale", gauge, "", "Factor of the loss before backward, with fp16.", "training"),
        define("torsh_samples", counter, "", "Samples trained on by all ranks.", "training"),
        define("torsh_tokens", counter, "", "Tokens trained on by all ranks.", "training"),
        define("torsh_samples_per_second", gauge, "", "Samples of all ranks per second, newest steps.", "training"),
        define("torsh_tokens_per_second", gauge, "", "Tokens of all ranks per second, newest steps.", "training"),
        define("torsh_last_step_timestamp_seconds", gauge, seconds, "Unix time of the last step's end.", "training"),
        define("torsh_nonfinite_values", counter, "", "Values that were NaN or infinite.", "training", ("metric",)),
    )
    compute = (
        define("torsh_step_seconds", distribution, seconds, "From the end of one step to the next.", "compute"),
        define("torsh_busy_seconds", distribution, seconds, "Step without waiting for ranks or data.", "compute"),
        define("torsh_forward_seconds", distribution, seconds, "Forward, without waiting for ranks.", "compute"),
        define("torsh_backward_seconds", distribution, seconds, "Backward, without waiting for ranks.", "compute"),
        define("torsh_optimizer_seconds", distribution, seconds, "Clipping and update, without waiting.", "compute"),
        define("torsh_bubble_seconds", distribution, seconds, "A stage has no microbatch to work on.", "compute"),
        define("torsh_flops_per_second", gauge, "", "Operations of the model per second on this rank.", "compute"),
        define("torsh_mfu_ratio", gauge, ratio, "Those operations over the device's peak in bf16.", "compute"),
        define("torsh_compile_seconds", counter, seconds, "Time spent in first calls of compiled code.", "compute"),
        define("torsh_process_cpu_cores", gauge, "", "Cores that this process keeps busy.", "compute"),
    )
    communication = (
        define("torsh_wait_seconds", distribution, seconds, "Waiting for other ranks in a step.", "communication"),
        define("torsh_wait_ratio", gauge, ratio, "Share of step time spent waiting for ranks.", "communication"),
        define("torsh_overlap_ratio", gauge, ratio, "Share of transfers hidden behind computing.", "communication"),
        define("torsh_collectives", counter, "", "Operations started, by kind.", "communication", ("op",)),
        define("torsh_collective_bytes", counter, size, "Size of what they fill.", "communication", ("op",)),
        define("torsh_collective_seconds", distribution, seconds, "Time in one operation.", "communication", ("op",)),
        define(
            "torsh_collective_bytes_per_second", gauge, "", "Bytes over the time in them.", "communication", ("op",)
        ),
        define("torsh_collective_errors", counter, "", "Operations that failed.", "communication", ("op",)),
        define("torsh_gradient_bytes", counter, size, "Gradients averaged, before encoding.", "communication"),
        define("torsh_gradient_wire_bytes", counter, size, "Gradients averaged, as sent.", "communication"),
    )
    axis = "axes"
    axes = (
        define("torsh_axis_operations", counter, "", "Operations of groups along an axis.", axis, ("axis",)),
        define("torsh_axis_bytes", counter, size, "Size of what they fill.", axis, ("axis",)),
        define("torsh_axis_wait_seconds", counter, seconds, "Training waited for them.", axis, ("axis",)),
        define("torsh_axis_seconds", distribution, seconds, "Time in one of them.", axis, ("axis",)),
        define("torsh_axis_bytes_per_second", gauge, "", "Bytes over the time in them.", axis, ("axis",)),
        define("torsh_axis_trend_ratio", gauge, ratio, "Change of that, newest over earlier ones.", axis, ("axis",)),
    )
    name, codec = "compression", ("codec",)
    codecs = (
        define("torsh_compression_seconds", distribution, seconds, "Average of a bucket through a codec.", name, codec),
        define("torsh_compression_bytes_per_second", gauge, "", "Bytes before encoding over that time.", name, codec),
        define("torsh_compression_trend_ratio", gauge, ratio, "Change of that, newest over earlier.", name, codec),
        define("torsh_compression_size_ratio", gauge, ratio, "Bytes sent over bytes before encoding.", name, codec),
    )
    memory = (
        define("torsh_host_memory_bytes", gauge, size, "Resident memory of the process.", "memory"),
        define("torsh_host_memory_peak_bytes", gauge, size, "Most resident memory of the process.", "memory"),
        define("torsh_device_memory_bytes", gauge, size, "Allocated by torch on its device.", "memory"),
        define("torsh_device_memory_peak_bytes", gauge, size, "Most allocated by torch on its device.", "memory"),
        define("torsh_device_memory_reserved_bytes", gauge, size, "Held by torch's allocator.", "memory"),
        define(
            "torsh_device_memory_fragmentation_ratio",
            gauge,
            ratio,
            "Part of what torch's allocator holds that is free between blocks in use.",
            "memory",
        ),
        define("torsh_memory_pressure", counter, "", "Reactions to short memory.", "memory", ("action",)),
    )
    data = (
        define("torsh_input_wait_seconds", distribution, seconds, "Waiting for the next batch.", "input"),
        define("torsh_input_wait_ratio", gauge, ratio, "Share of step time spent waiting for data.", "input"),
    )
    state = (
        define("torsh_checkpoints", counter, "", "Checkpoints, by what was done.", "checkpoints", ("action",)),
        define("torsh_checkpoint_errors", counter, "", "Checkpoints that failed.", "checkpoints", ("action",)),
        define(
            "torsh_checkpoint_seconds", distribution, seconds, "Time a checkpoint took.", "checkpoints", ("action",)
        ),
        define("torsh_checkpoint_size_bytes", gauge, size, "Size of the newest checkpoint.", "checkpoints"),
        define("torsh_checkpoint_step", gauge, "", "Step of the newest saved checkpoint.", "checkpoints"),
        define("torsh_expert_load_variation_ratio", gauge, ratio, "Spread of rows over experts.", "experts"),
        define("torsh_expert_load_trend_ratio", gauge, ratio, "Change of that, newest over earlier.", "experts"),
        define("torsh_expert_dropped", counter, "", "Choices of experts without room.", "experts"),
        define("torsh_expert_choices", counter, "", "Choices of experts that were computed.", "experts"),
        define("torsh_expert_capacity_use_ratio", gauge, ratio, "Used part of the experts' room.", "experts"),
        define("torsh_routed_tokens", counter, "", "Tokens that gates decided about, on all ranks.", "experts"),
        define("torsh_routing_seconds", distribution, seconds, "Decision of a gate on a batch.", "experts"),
        define("torsh_routing_tokens_per_second", gauge, "", "Tokens over the time of decisions.", "experts"),
        define("torsh_routing_trend_ratio", gauge, ratio, "Change of that, newest over earlier.", "experts"),
        define("torsh_parameter_pushes", counter, "", "Pushes to parameter servers.", "parameters"),
        define("torsh_parameter_pulls", counter, "", "Pulls from parameter servers.", "parameters"),
        define("torsh_parameter_version", gauge, "", "Version that was pulled last.", "parameters"),
        define("torsh_parameter_staleness", distribution, "", "Versions that a gradient was behind.", "parameters"),
        define("torsh_parameter_bytes", counter, size, "Gradients and parameters.", "parameters", ("operation",)),
        define("torsh_parameter_seconds", distribution, seconds, "Time of each.", "parameters", ("operation",)),
        define("torsh_observe_dropped", counter, "", "Events that came too fast to be counted.", "observing"),
    )
    machine = (
        define("torsh_node_cpu_ratio", gauge, ratio, "Busy share of the node's cores.", "machine", (), node),
        define("torsh_node_io_wait_ratio", gauge, ratio, "Cores idle until a disk answers.", "machine", (), node),
        define("torsh_node_load", gauge, "", "Load average over a minute.", "machine", (), node),
        define("torsh_node_memory_used_bytes", gauge, size, "Memory in use.", "machine", (), node),
        define("torsh_node_memory_total_bytes", gauge, size, "Memory of the node.", "machine", (), node),
        define("torsh_node_memory_ratio", gauge, ratio, "Part of the memory in use.", "machine", (), node),
        define("torsh_node_network_receive_bytes", counter, size, "Received, without loopback.", "machine", (), node),
        define("torsh_node_network_transmit_bytes", counter, size, "Sent, without loopback.", "machine", (), node),
        define("torsh_node_disk_read_bytes", counter, size, "Read from disks.", "machine", (), node),
        define("torsh_node_disk_write_bytes", counter, size, "Written to disks.", "machine", (), node),
        define("torsh_node_temperature_celsius", gauge, "celsius", "Of a sensor.", "machine", ("sensor",), node),
        define("torsh_node_energy_joules", counter, "joules", "Energy of a processor.", "machine", ("meter",), node),
        define("torsh_gpu_utilization_ratio", gauge, ratio, "Time with a kernel running.", "machine", ("gpu",), node),
        define("torsh_gpu_memory_used_bytes", gauge, size, "Memory of a GPU in use.", "machine", ("gpu",), node),
        define("torsh_gpu_memory_total_bytes", gauge, size, "Memory of a GPU.", "machine", ("gpu",), node),
        define("torsh_gpu_memory_ratio", gauge, ratio, "Part of a GPU's memory in use.", "machine", ("gpu",), node),
        define("torsh_gpu_temperature_celsius", gauge, "celsius", "Of a GPU.", "machine", ("gpu",), node),
        define("torsh_gpu_power_watts", gauge, "watts", "Power of a GPU.", "machine", ("gpu",), node),
        define("torsh_gpu_energy_joules", counter, "joules", "Energy of a GPU since boot.", "machine", ("gpu",), node),
    )
    whole = (
        define("torsh_ranks", gauge, "", "Ranks that report.", "job", (), job),
        define("torsh_world_size", gauge, "", "Ranks of the job.", "job", (), job),
        define("torsh_planned_steps", gauge, "", "Steps that the job is to do in all.", "job", (), job),
        define("torsh_remaining_seconds", gauge, seconds, "To its last step, at the newest pace.", "job", (), job),
        define(
            "torsh_loss_regained_ratio",
            gauge,
            ratio,
            "Part of the loss's fall so far that it has risen again; smoothed.",
            "job",
            (),
            job,
        ),
        define("torsh_restarts", gauge, "", "Restarts of all workers so far.", "job", (), job),
        define("torsh_failures", counter, "", "Workers or nodes lost.", "job", (), job),
        define("torsh_regroupings", counter, "", "Times an elastic world went on with other ranks.", "job", (), job),
        define("torsh_straggler", gauge, "", "1 for a rank that others wait for.", "job", ("rank",), job),
        define("torsh_anomalies", counter, "", "Anomalies found, by kind.", "job", ("kind",), job),
        define("torsh_alert_firing", gauge, "", "1 while a rule fires.", "job", ("alert", "severity"), job),
        define("torsh_packets_dropped", counter, "", "Summaries that were lost or malformed.", "observing", (), job),
    )
    energy = (
        define("torsh_energy_joules", counter, "joules", "Energy of all nodes, by label.", "energy", ("label",), job),
        define("torsh_power_watts", gauge, "watts", "Power of all nodes, newest interval.", "energy", (), job),
        define("torsh_idle_watts", gauge, "watts", "Least power of an interval so far.", "energy", (), job),
        define("torsh_joules_per_step", gauge, "joules", "Mean of the steps that count.", "energy", (), job),
        define("torsh_joules_per_sample", gauge, "joules", "All energy over committed samples.", "energy", (), job),
        define("torsh_wasted_joules", counter, "joules", "Lost energy, by cause.", "energy", ("cause",), job),
        define("torsh_predicted_joules", gauge, "joules", "At the end of the job, at this rate.", "energy", (), job),
        define("torsh_co2_grams", counter, "", "Grams of CO2, at each interval's intensity.", "energy", (), job),
        define("torsh_held_joules", counter, "joules", "While the policy let the job wait.", "energy", (), job),
        define("torsh_holding", gauge, "", "1 while the policy lets the job wait.", "energy", (), job),
        define("torsh_budget_ratio", gauge, ratio, "Spent part of a budget.", "energy", ("budget",), job),
        define("torsh_carbon_intensity", gauge, "", "Grams of CO2 a kWh that count now.", "energy", (), job),
    )
    name = "federated"
    federated = (
        define("torsh_federated_rounds", counter, "", "Rounds that count.", name, (), job),
        define("torsh_federated_updates", counter, "", "Updates of clients that count.", name, (), job),
        define("torsh_federated_lost_updates", counter, "", "Clients asked that did not count.", name, (), job),
        define("torsh_federated_bytes", counter, size, "Between clients and server.", name, ("direction",), job),
        define("torsh_federated_round_seconds", gauge, seconds, "Of the last round.", name, (), job),
        define("torsh_federated_epsilon", gauge, "", "Of differential privacy, so far.", name, (), job),
        define("torsh_federated_figure", gauge, "", "Of the global model, by name.", name, ("figure",), job),
        define(
            "torsh_federated_link_bytes_per_second",
            gauge,
            "",
            "Of the last upload of each client of the last round: the 20 slowest.",
            name,
            ("client",),
            job,
        ),
    )
    return (
        training
        + compute
        + communication
        + axes
        + codecs
        + memory
        + data
        + state
        + machine
        + whole
        + energy
        + federated
    )


CATALOGUE: Mapping[str, MetricDefinition] = {definition.name: definition for definition in _table()}
"""By name."""

BUCKETS_S: tuple[float, ...] = (
    0.0001, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 10.0,
)  # fmt: skip
"""Upper bounds of the buckets of a distribution, in seconds; what is above counts in the last, `+Inf`."""
