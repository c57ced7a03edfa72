"""`python -m …host_scale JOB WORKERS`, on the host that leads a job: asks its launcher for another number of workers.

Not `torsh scale`: that looks into the user's records first, and where hosts share a home directory it would find the
submitted job there and come back over ssh.
"""

from __future__ import annotations

import sys

from torsh_distributed.errors import TorshError
from torsh_distributed.launch.control.job_commands import ask_launcher, find_job


def main() -> int:
    """Print what the launcher answers; 1 if it did not do it."""
    job, workers = sys.argv[1], int(sys.argv[2])
    try:
        answer = ask_launcher(find_job(job).pid, "scale", workers=workers)
    except TorshError as error:
        sys.stderr.write(f"{error}\n")
        return 1
    is_done = bool(answer.get("is_done"))
    (sys.stdout if is_done else sys.stderr).write(f"{answer.get('text', '')}\n")
    return 0 if is_done else 1


if __name__ == "__main__":
    sys.exit(main())
