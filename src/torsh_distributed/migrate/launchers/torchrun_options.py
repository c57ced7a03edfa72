"""torchrun's options: most are those of `torsh run`, by the same names."""

from __future__ import annotations

from torsh_distributed.migrate.launchers.line_draft import (
    LineDraft,
    LineOption,
    as_option,
    not_here,
    same_anyway,
    without_effect,
)
from torsh_distributed.migrate.report import Verdict


def _nnodes(draft: LineDraft, option: str, values: list[str]) -> None:
    first, colon, last = values[0].partition(":")
    if not colon or first == last:
        draft.options += ["--nnodes", first]
        draft.note(option, values, Verdict.HONOURED, f"--nnodes {first}")
        return
    draft.options += ["--nnodes", last, "--elastic"]
    draft.note(
        option,
        values,
        Verdict.EQUIVALENT,
        f"--nnodes {last} --elastic",
        "survivors go on; workers come and go by torsh scale",
    )


def _endpoint_kind(draft: LineDraft, option: str, values: list[str]) -> None:
    if values[0] in ("static", "c10d"):
        draft.options += ["--rdzv-backend", values[0]]
        draft.note(option, values, Verdict.HONOURED, f"--rdzv-backend {values[0]}")
    else:
        draft.note(option, values, Verdict.REFUSED, "", "the launcher of node 0 serves the rendezvous: use c10d")


TORCHRUN_OPTIONS: dict[str, LineOption] = {
    "--nnodes": LineOption(1, _nnodes),
    "--nproc-per-node": as_option("--nproc-per-node"),
    "--rdzv-backend": LineOption(1, _endpoint_kind),
    "--rdzv-endpoint": as_option("--rdzv-endpoint"),
    "--rdzv-id": as_option("--rdzv-id"),
    "--rdzv-conf": without_effect("--join-timeout is the time for launchers to meet"),
    "--standalone": as_option("--standalone", 0),
    "--max-restarts": as_option("--max-restarts"),
    "--monitor-interval": same_anyway("the end of a worker is an event, not polled"),
    "--start-method": same_anyway("workers are started fresh"),
    "--event-log-handler": without_effect("TORSH_EVENTS_DIR=DIR keeps events"),
    "--role": as_option("--role"),
    "--module": as_option("--module", 0),
    "-m": as_option("--module", 0),
    "--no-python": as_option("--no-python", 0),
    "--run-path": not_here("leave it out: a script runs under its own path", 0),
    "--log-dir": as_option("--log-dir"),
    "--redirects": without_effect("--log-dir keeps both streams of every rank"),
    "-r": without_effect("--log-dir keeps both streams of every rank"),
    "--tee": without_effect("--log-dir keeps both streams, and they are shown"),
    "-t": without_effect("--log-dir keeps both streams, and they are shown"),
    "--local-ranks-filter": as_option("--local-ranks-filter"),
    "--duplicate-stdout-filters": without_effect("--log-dir keeps whole streams"),
    "--duplicate-stderr-filters": without_effect("--log-dir keeps whole streams"),
    "--node-rank": as_option("--node-rank"),
    "--master-addr": as_option("--master-addr"),
    "--master-port": as_option("--master-port"),
    "--local-addr": without_effect("ranks listen where the route to the master leaves this node"),
    "--logs-specs": not_here("use --log-dir"),
    "--numa-binding": not_here("use numactl inside the job"),
    "--signals-to-handle": same_anyway("SIGTERM, SIGINT and SIGHUP are passed on"),
    "--shutdown-timeout": as_option("--shutdown-timeout"),
    "--virtual-local-rank": not_here("set CUDA_VISIBLE_DEVICES in the script by LOCAL_RANK", 0),
    # torch.distributed.launch
    "--use-env": same_anyway("ranks are in the environment", 0),
}
"""Every option of torch 2.13's torchrun."""
