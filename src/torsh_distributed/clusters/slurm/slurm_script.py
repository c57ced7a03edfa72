"""The batch script of a submission. Pure: a submission in, text out."""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from pathlib import Path

from torsh_distributed.clusters.submission import Submission, clock_time, parse_memory
from torsh_distributed.errors import InvalidArgument

OPTIONS = {
    "partition": "where it queues",
    "account": "who pays",
    "qos": "quality of service",
    "constraint": "features that nodes must have",
    "reservation": "reservation to run in",
    "nodelist": "nodes it must get",
    "exclude": "nodes it must not get",
    "exclusive": "yes: whole nodes",
    "gpu_type": "kind of GPU in gres, as in gpu:a100:4",
    "array": "indices of a job array, as 0-9%2",
    "signal_s": "seconds before the time limit at which ranks are told to save; default 60",
    "requeue": "no: a job that saved and ended is not put back into the queue",
    "port_range": "FIRST-LAST, the only ports to listen on",
    "sbatch": "further options of sbatch, as they are",
    "srun": "further options of srun, as they are",
}
_PLAIN = ("partition", "account", "qos", "constraint", "reservation", "nodelist", "exclude", "array")
_DEFAULT_SIGNAL_S = 60

_BODY = """
# Told to end, the shell waits for the ranks, which save first.
trap : TERM USR1
cd {directory} || exit 1
rm -f {folder}/"exit$suffix.json" {folder}/reports/rank-*.json

{exports}
srun --kill-on-bad-exit=1 --label {srun_options}{command}
code=$?
"""

_REQUEUE = """
# 75 without a report of a failure: the ranks have saved and can go on.
again=no
if [ "$code" -eq 75 ] && [ -z "$(ls {folder}/reports)" ]; then
    again=yes
elif [ "$code" -ne 0 ]; then
    failures=$(cat {folder}/"failures$suffix" 2>/dev/null || echo 0)
    if [ "$failures" -lt {max_restarts} ]; then
        echo $((failures + 1)) > {folder}/"failures$suffix"
        again=yes
    fi
fi
# A job that SLURM itself is ending, because somebody cancelled it, is not brought back.
if [ "$again" = yes ] && [ ! -e {folder}/cancelled ] &&
    scontrol show job "$SLURM_JOB_ID" | grep -q "JobState=RUNNING "; then
    echo "torsh: exit code $code; job $SLURM_JOB_ID goes back into the queue"
    scontrol requeue "$SLURM_JOB_ID" && exit "$code"
fi
"""

_END = """
# What SLURM forgets some minutes after the end.
echo "{{\\"exit_code\\": $code}}" > {folder}/".exit$suffix" && mv {folder}/".exit$suffix" {folder}/"exit$suffix.json"
exit "$code"
"""


def slurm_script(
    submission: Submission, options: Mapping[str, str], *, folder: Path, command: list[str], env: Mapping[str, str]
) -> str:
    """The text of the script. `folder` is the job's, on a file system that the nodes share; `env` is exported.

    Values of the user's variables are in it, so it is written for this user alone.
    """
    lines = ["#!/bin/bash", *(f"#SBATCH {line}" for line in _directives(submission, options, folder))]
    # One file per task of an array.
    suffix = 'suffix="${SLURM_ARRAY_TASK_ID:+-$SLURM_ARRAY_TASK_ID}"'
    quoted = shlex.quote(str(folder))
    body = _BODY.format(
        directory=shlex.quote(str(submission.working_dir)),
        folder=quoted,
        exports="\n".join(f"export {name}={shlex.quote(value)}" for name, value in sorted(env.items())),
        srun_options=f"{options['srun']} " if options.get("srun") else "",
        command=shlex.join(command),
    )
    ending = _END.format(folder=quoted)
    if _requeues(options):
        ending = _REQUEUE.format(folder=quoted, max_restarts=submission.max_restarts) + ending
    return "\n".join([*lines, "", suffix]) + body + ending


def _directives(submission: Submission, options: Mapping[str, str], folder: Path) -> list[str]:
    output = "output-%a.log" if "array" in options else "output.log"
    lines = [
        f"--job-name={submission.name}",
        f"--nodes={submission.nodes}",
        f"--ntasks-per-node={submission.workers_per_node}",
        f"--cpus-per-task={submission.cpus_per_worker}",
        f"--output={folder / output}",
        "--open-mode=append",
        "--requeue" if _requeues(options) else "--no-requeue",
    ]
    if submission.gpus_per_worker:
        kind = f"{options['gpu_type']}:" if "gpu_type" in options else ""
        lines.append(f"--gres=gpu:{kind}{submission.gpus_per_worker * submission.workers_per_node}")
    if submission.memory_per_worker is not None:
        total = parse_memory(submission.memory_per_worker) * submission.workers_per_node
        lines.append(f"--mem={-(-total // 2**20)}M")
    if submission.time_limit_s is not None:
        # SLURM counts in minutes: seconds are rounded up by itself.
        lines.append(f"--time={clock_time(submission.time_limit_s)}")
        lines.append(f"--signal=USR1@{_signal_s(options)}")
    lines += [f"--{name}={options[name]}" for name in _PLAIN if name in options]
    if options.get("exclusive", "no") == "yes":
        lines.append("--exclusive")
    lines += shlex.split(options.get("sbatch", ""))
    for line in lines:
        if "\n" in line:
            raise InvalidArgument("an option of sbatch may not have a line break", got=line)
    return [f'"{line}"' if " " in line else line for line in lines]


def _signal_s(options: Mapping[str, str]) -> int:
    text = options.get("signal_s", str(_DEFAULT_SIGNAL_S))
    if not text.isdigit() or int(text) > 65535:
        raise InvalidArgument("signal_s must be a number of seconds up to 65535", got=text)
    return int(text)


def _requeues(options: Mapping[str, str]) -> bool:
    chosen = options.get("requeue", "yes")
    if chosen not in ("yes", "no"):
        raise InvalidArgument("requeue must be yes or no", got=chosen)
    return chosen == "yes"
