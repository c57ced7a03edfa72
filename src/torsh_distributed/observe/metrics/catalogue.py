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


_COUNTER, _GAUGE, _DISTRIBUTION = MetricKind
_Row = tuple[str, MetricKind, str, str] | tuple[str, MetricKind, str, str, tuple[str, ...]]
_TABLE: tuple[tuple[str, MetricScope, tuple[_Row, ...]], ...] = (
    (
        "training",
        MetricScope.RANK,
        (
            ("torsh_step", _GAUGE, "", "Number of the last optimizer update."),
            ("torsh_epoch", _GAUGE, "", "Passes over the data that were complete before the last step."),
            ("torsh_steps", _COUNTER, "", "Optimizer updates since this process started."),
            ("torsh_skipped_steps", _COUNTER, "", "Updates skipped because gradients overflowed fp16."),
            ("torsh_loss", _GAUGE, "", "Mean loss of the last step over all ranks; of a plain loop, this rank's."),
            ("torsh_validation_loss", _GAUGE, "", "Mean loss of the last evaluation over all ranks."),
            ("torsh_learning_rate", _GAUGE, "", "Learning rate of the last step."),
            ("torsh_gradient_norm", _GAUGE, "", "Norm of the whole gradient in the last step."),
            ("torsh_loss_scale", _GAUGE, "", "Factor of the loss before backward, with fp16."),
            ("torsh_samples", _COUNTER, "", "Samples trained on by all ranks."),
            ("torsh_tokens", _COUNTER, "", "Tokens trained on by all ranks."),
            ("torsh_samples_per_second", _GAUGE, "", "Samples of all ranks per second, newest steps."),
            ("torsh_tokens_per_second", _GAUGE, "", "Tokens of all ranks per second, newest steps."),
            ("torsh_last_step_timestamp_seconds", _GAUGE, "seconds", "Unix time of the last step's end."),
            ("torsh_nonfinite_values", _COUNTER, "", "Values that were NaN or infinite.", ("metric",)),
        ),
    ),
    (
        "compute",
        MetricScope.RANK,
        (
            ("torsh_step_seconds", _DISTRIBUTION, "seconds", "From the end of one step to the next."),
            ("torsh_busy_seconds", _DISTRIBUTION, "seconds", "Step without waiting for ranks or data."),
            ("torsh_forward_seconds", _DISTRIBUTION, "seconds", "Forward, without waiting for ranks."),
            ("torsh_backward_seconds", _DISTRIBUTION, "seconds", "Backward, without waiting for ranks."),
            ("torsh_optimizer_seconds", _DISTRIBUTION, "seconds", "Clipping and update, without waiting."),
            ("torsh_bubble_seconds", _DISTRIBUTION, "seconds", "A stage has no microbatch to work on."),
            ("torsh_flops_per_second", _GAUGE, "", "Operations of the model per second on this rank."),
            ("torsh_mfu_ratio", _GAUGE, "ratio", "Those operations over the device's peak in bf16."),
            ("torsh_compile_seconds", _COUNTER, "seconds", "Time spent in first calls of compiled code."),
            ("torsh_process_cpu_cores", _GAUGE, "", "Cores that this process keeps busy."),
        ),
    ),
    (
        "communication",
        MetricScope.RANK,
        (
            ("torsh_wait_seconds", _DISTRIBUTION, "seconds", "Waiting for other ranks in a step."),
            ("torsh_wait_ratio", _GAUGE, "ratio", "Share of step time spent waiting for ranks."),
            ("torsh_overlap_ratio", _GAUGE, "ratio", "Share of transfers hidden behind computing."),
            ("torsh_collectives", _COUNTER, "", "Operations started, by kind.", ("op",)),
            ("torsh_collective_bytes", _COUNTER, "bytes", "Size of what they fill.", ("op",)),
            ("torsh_collective_seconds", _DISTRIBUTION, "seconds", "Time in one operation.", ("op",)),
            ("torsh_collective_bytes_per_second", _GAUGE, "", "Bytes over the time in them.", ("op",)),
            ("torsh_collective_errors", _COUNTER, "", "Operations that failed.", ("op",)),
            ("torsh_gradient_bytes", _COUNTER, "bytes", "Gradients averaged, before encoding."),
            ("torsh_gradient_wire_bytes", _COUNTER, "bytes", "Gradients averaged, as sent."),
        ),
    ),
    (
        "axes",
        MetricScope.RANK,
        (
            ("torsh_axis_operations", _COUNTER, "", "Operations of groups along an axis.", ("axis",)),
            ("torsh_axis_bytes", _COUNTER, "bytes", "Size of what they fill.", ("axis",)),
            ("torsh_axis_wait_seconds", _COUNTER, "seconds", "Training waited for them.", ("axis",)),
            ("torsh_axis_seconds", _DISTRIBUTION, "seconds", "Time in one of them.", ("axis",)),
            ("torsh_axis_bytes_per_second", _GAUGE, "", "Bytes over the time in them.", ("axis",)),
            ("torsh_axis_trend_ratio", _GAUGE, "ratio", "Change of that, newest over earlier ones.", ("axis",)),
        ),
    ),
    (
        "compression",
        MetricScope.RANK,
        (
            ("torsh_compression_seconds", _DISTRIBUTION, "seconds", "Average of a bucket through a codec.", ("codec",)),
            ("torsh_compression_bytes_per_second", _GAUGE, "", "Bytes before encoding over that time.", ("codec",)),
            ("torsh_compression_trend_ratio", _GAUGE, "ratio", "Change of that, newest over earlier.", ("codec",)),
            ("torsh_compression_size_ratio", _GAUGE, "ratio", "Bytes sent over bytes before encoding.", ("codec",)),
        ),
    ),
    (
        "memory",
        MetricScope.RANK,
        (
            ("torsh_host_memory_bytes", _GAUGE, "bytes", "Resident memory of the process."),
            ("torsh_host_memory_peak_bytes", _GAUGE, "bytes", "Most resident memory of the process."),
            ("torsh_device_memory_bytes", _GAUGE, "bytes", "Allocated by torch on its device."),
            ("torsh_device_memory_peak_bytes", _GAUGE, "bytes", "Most allocated by torch on its device."),
            ("torsh_device_memory_reserved_bytes", _GAUGE, "bytes", "Held by torch's allocator."),
            (
                "torsh_device_memory_fragmentation_ratio",
                _GAUGE,
                "ratio",
                "Part of what torch's allocator holds that is free between blocks in use.",
            ),
            ("torsh_memory_pressure", _COUNTER, "", "Reactions to short memory.", ("action",)),
        ),
    ),
    (
        "input",
        MetricScope.RANK,
        (
            ("torsh_input_wait_seconds", _DISTRIBUTION, "seconds", "Waiting for the next batch."),
            ("torsh_input_wait_ratio", _GAUGE, "ratio", "Share of step time spent waiting for data."),
        ),
    ),
    (
        "checkpoints",
        MetricScope.RANK,
        (
            ("torsh_checkpoints", _COUNTER, "", "Checkpoints, by what was done.", ("action",)),
            ("torsh_checkpoint_errors", _COUNTER, "", "Checkpoints that failed.", ("action",)),
            ("torsh_checkpoint_seconds", _DISTRIBUTION, "seconds", "Time a checkpoint took.", ("action",)),
            ("torsh_checkpoint_size_bytes", _GAUGE, "bytes", "Size of the newest checkpoint."),
            ("torsh_checkpoint_step", _GAUGE, "", "Step of the newest saved checkpoint."),
        ),
    ),
    (
        "experts",
        MetricScope.RANK,
        (
            ("torsh_expert_load_variation_ratio", _GAUGE, "ratio", "Spread of rows over experts."),
            ("torsh_expert_load_trend_ratio", _GAUGE, "ratio", "Change of that, newest over earlier."),
            ("torsh_expert_dropped", _COUNTER, "", "Choices of experts without room."),
            ("torsh_expert_choices", _COUNTER, "", "Choices of experts that were computed."),
            ("torsh_expert_capacity_use_ratio", _GAUGE, "ratio", "Used part of the experts' room."),
            ("torsh_routed_tokens", _COUNTER, "", "Tokens that gates decided about, on all ranks."),
            ("torsh_routing_seconds", _DISTRIBUTION, "seconds", "Decision of a gate on a batch."),
            ("torsh_routing_tokens_per_second", _GAUGE, "", "Tokens over the time of decisions."),
            ("torsh_routing_trend_ratio", _GAUGE, "ratio", "Change of that, newest over earlier."),
        ),
    ),
    (
        "parameters",
        MetricScope.RANK,
        (
            ("torsh_parameter_pushes", _COUNTER, "", "Pushes to parameter servers."),
            ("torsh_parameter_pulls", _COUNTER, "", "Pulls from parameter servers."),
            ("torsh_parameter_version", _GAUGE, "", "Version that was pulled last."),
            ("torsh_parameter_staleness", _DISTRIBUTION, "", "Versions that a gradient was behind."),
            ("torsh_parameter_bytes", _COUNTER, "bytes", "Gradients and parameters.", ("operation",)),
            ("torsh_parameter_seconds", _DISTRIBUTION, "seconds", "Time of each.", ("operation",)),
        ),
    ),
    (
        "observing",
        MetricScope.RANK,
        (("torsh_observe_dropped", _COUNTER, "", "Events that came too fast to be counted."),),
    ),
    (
        "machine",
        MetricScope.NODE,
        (
            ("torsh_node_cpu_ratio", _GAUGE, "ratio", "Busy share of the node's cores."),
            ("torsh_node_io_wait_ratio", _GAUGE, "ratio", "Cores idle until a disk answers."),
            ("torsh_node_load", _GAUGE, "", "Load average over a minute."),
            ("torsh_node_memory_used_bytes", _GAUGE, "bytes", "Memory in use."),
            ("torsh_node_memory_total_bytes", _GAUGE, "bytes", "Memory of the node."),
            ("torsh_node_memory_ratio", _GAUGE, "ratio", "Part of the memory in use."),
            ("torsh_node_network_receive_bytes", _COUNTER, "bytes", "Received, without loopback."),
            ("torsh_node_network_transmit_bytes", _COUNTER, "bytes", "Sent, without loopback."),
            ("torsh_node_disk_read_bytes", _COUNTER, "bytes", "Read from disks."),
            ("torsh_node_disk_write_bytes", _COUNTER, "bytes", "Written to disks."),
            ("torsh_node_temperature_celsius", _GAUGE, "celsius", "Of a sensor.", ("sensor",)),
            ("torsh_node_energy_joules", _COUNTER, "joules", "Energy of a processor.", ("meter",)),
            ("torsh_gpu_utilization_ratio", _GAUGE, "ratio", "Time with a kernel running.", ("gpu",)),
            ("torsh_gpu_memory_used_bytes", _GAUGE, "bytes", "Memory of a GPU in use.", ("gpu",)),
            ("torsh_gpu_memory_total_bytes", _GAUGE, "bytes", "Memory of a GPU.", ("gpu",)),
            ("torsh_gpu_memory_ratio", _GAUGE, "ratio", "Part of a GPU's memory in use.", ("gpu",)),
            ("torsh_gpu_temperature_celsius", _GAUGE, "celsius", "Of a GPU.", ("gpu",)),
            ("torsh_gpu_power_watts", _GAUGE, "watts", "Power of a GPU.", ("gpu",)),
            ("torsh_gpu_energy_joules", _COUNTER, "joules", "Energy of a GPU since boot.", ("gpu",)),
        ),
    ),
    (
        "job",
        MetricScope.JOB,
        (
            ("torsh_ranks", _GAUGE, "", "Ranks that report."),
            ("torsh_world_size", _GAUGE, "", "Ranks of the job."),
            ("torsh_planned_steps", _GAUGE, "", "Steps that the job is to do in all."),
            ("torsh_remaining_seconds", _GAUGE, "seconds", "To its last step, at the newest pace."),
            (
                "torsh_loss_regained_ratio",
                _GAUGE,
                "ratio",
                "Part of the loss's fall so far that it has risen again; smoothed.",
            ),
            ("torsh_restarts", _GAUGE, "", "Restarts of all workers so far."),
            ("torsh_failures", _COUNTER, "", "Workers or nodes lost."),
            ("torsh_regroupings", _COUNTER, "", "Times an elastic world went on with other ranks."),
            ("torsh_straggler", _GAUGE, "", "1 for a rank that others wait for.", ("rank",)),
            ("torsh_anomalies", _COUNTER, "", "Anomalies found, by kind.", ("kind",)),
            ("torsh_alert_firing", _GAUGE, "", "1 while a rule fires.", ("alert", "severity")),
        ),
    ),
    (
        "observing",
        MetricScope.JOB,
        (("torsh_packets_dropped", _COUNTER, "", "Summaries that were lost or malformed."),),
    ),
    (
        "energy",
        MetricScope.JOB,
        (
            ("torsh_energy_joules", _COUNTER, "joules", "Energy of all nodes, by label.", ("label",)),
            ("torsh_power_watts", _GAUGE, "watts", "Power of all nodes, newest interval."),
            ("torsh_idle_watts", _GAUGE, "watts", "Least power of an interval so far."),
            ("torsh_joules_per_step", _GAUGE, "joules", "Mean of the steps that count."),
            ("torsh_joules_per_sample", _GAUGE, "joules", "All energy over committed samples."),
            ("torsh_wasted_joules", _COUNTER, "joules", "Lost energy, by cause.", ("cause",)),
            ("torsh_predicted_joules", _GAUGE, "joules", "At the end of the job, at this rate."),
            ("torsh_co2_grams", _COUNTER, "", "Grams of CO2, at each interval's intensity."),
            ("torsh_held_joules", _COUNTER, "joules", "While the policy let the job wait."),
            ("torsh_holding", _GAUGE, "", "1 while the policy lets the job wait."),
            ("torsh_budget_ratio", _GAUGE, "ratio", "Spent part of a budget.", ("budget",)),
            ("torsh_carbon_intensity", _GAUGE, "", "Grams of CO2 a kWh that count now."),
        ),
    ),
    (
        "federated",
        MetricScope.JOB,
        (
            ("torsh_federated_rounds", _COUNTER, "", "Rounds that count."),
            ("torsh_federated_updates", _COUNTER, "", "Updates of clients that count."),
            ("torsh_federated_lost_updates", _COUNTER, "", "Clients asked that did not count."),
            ("torsh_federated_bytes", _COUNTER, "bytes", "Between clients and server.", ("direction",)),
            ("torsh_federated_round_seconds", _GAUGE, "seconds", "Of the last round."),
            ("torsh_federated_epsilon", _GAUGE, "", "Of differential privacy, so far."),
            ("torsh_federated_figure", _GAUGE, "", "Of the global model, by name.", ("figure",)),
            (
                "torsh_federated_link_bytes_per_second",
                _GAUGE,
                "",
                "Of the last upload of each client of the last round: the 20 slowest.",
                ("client",),
            ),
        ),
    ),
)
"""A topic, whom it is about, and its metrics: name, kind, unit, help, and labels if there are any."""

CATALOGUE: Mapping[str, MetricDefinition] = {
    row[0]: MetricDefinition(*row[:4], topic, row[4] if len(row) == 5 else (), scope)
    for topic, scope, rows in _TABLE
    for row in rows
}
"""By name."""

BUCKETS_S: tuple[float, ...] = (
    0.0001, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 10.0,
)  # fmt: skip
"""Upper bounds of the buckets of a distribution, in seconds; what is above counts in the last, `+Inf`."""
