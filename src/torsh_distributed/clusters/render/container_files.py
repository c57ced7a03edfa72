"""A Dockerfile, and a compose file with a master and workers, from the same words."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import yaml

from torsh_distributed.clusters.engine_options import require_known_options
from torsh_distributed.clusters.kubernetes.kubernetes_options import HEALTH_PORT, quantity
from torsh_distributed.clusters.render.rendered_files import RenderedFile
from torsh_distributed.clusters.run_arguments import entry_arguments
from torsh_distributed.clusters.submission import Submission
from torsh_distributed.errors import InvalidArgument
from torsh_distributed.launch.spec import Entry, EntryKind

_SETTINGS = {
    "base": "the image to build on (python:3.12-slim)",
    "package": "what pip installs for this library: a name, a wheel or an address (torsh-distributed)",
    "torch_index": "the package index for torch, such as https://download.pytorch.org/whl/cpu",
    "packages": "further packages, with commas",
    "shm": "the size of /dev/shm in a container (2G)",
    "user": "the number of the user in the container (1000)",
}
_WORKDIR, _SECRET = "/workspace", "job.token"


def render_docker(submission: Submission) -> list[RenderedFile]:
    """`Dockerfile` and `.dockerignore`; the build's folder is the one with the script."""
    require_known_options("docker", submission.options, _SETTINGS)
    return [RenderedFile("Dockerfile", _dockerfile(submission)), RenderedFile(".dockerignore", _IGNORED)]


def render_compose(submission: Submission) -> list[RenderedFile]:
    """The Dockerfile and `compose.yaml`: a service per node, the first is the master."""
    require_known_options("compose", submission.options, _SETTINGS)
    return [*render_docker(submission), RenderedFile("compose.yaml", _compose(submission))]


_IGNORED = ".git\n.venv\n__pycache__\n*.pyc\n*.token\ncheckpoints\nruns\n"


def _dockerfile(submission: Submission) -> str:
    options = submission.options
    user = options.get("user", "1000")
    if not user.isdigit():
        raise InvalidArgument("user must be a number", user=user)
    index = f"--index-url {options['torch_index']} " if "torch_index" in options else ""
    more = " ".join(f'"{name.strip()}"' for name in options.get("packages", "").split(",") if name.strip())
    package = options.get("package", "torsh-distributed")
    probe = f"import urllib.request as u; u.urlopen('http://127.0.0.1:{HEALTH_PORT}/healthz', timeout=3)"
    lines = [
        "# Made by torsh-distributed. Build it in the folder of the script: docker build -t NAME .",
        f"FROM {options.get('base', 'python:3.12-slim')}",
        "",
        "ENV PYTHONUNBUFFERED=1 PIP_NO_CACHE_DIR=1 PIP_DISABLE_PIP_VERSION_CHECK=1",
        f'RUN pip install {index}"torch>=2.11,<2.14" numpy',
        f'RUN pip install "{package}"{" " + more if more else ""}',
        "",
        f"RUN useradd --uid {user} --create-home trainer && install -d -o trainer {_WORKDIR}",
        f"WORKDIR {_WORKDIR}",
        f"COPY --chown={user} . {_WORKDIR}",
        f"USER {user}",
        "",
        "# torsh run is process 1: SIGTERM reaches it, the ranks save and end within its --signal-timeout.",
        "STOPSIGNAL SIGTERM",
        f'HEALTHCHECK --interval=10s --timeout=5s --start-period=60s CMD ["python", "-c", "{probe}"]',
        'ENTRYPOINT ["torsh", "run"]',
        "CMD " + json.dumps(["--health", str(HEALTH_PORT), *_words(submission)]),
    ]
    return "\n".join(lines) + "\n"


def _words(submission: Submission) -> list[str]:
    """Arguments of `torsh run` inside the container, where files lie in the working directory."""
    return [*("--nproc-per-node", str(submission.workers_per_node)), *entry_arguments(_inside(submission))]


def _inside(submission: Submission) -> Submission:
    def moved(path: str | Path) -> str:
        whole = submission.working_dir / path
        if not whole.is_relative_to(submission.working_dir):
            raise InvalidArgument(
                f"{whole} is not in the folder that the image is built from",
                hint=f"move it into {submission.working_dir}, or start in another folder",
            )
        return f"{_WORKDIR}/{whole.relative_to(submission.working_dir)}"

    entry = submission.entry
    if entry.kind is EntryKind.SCRIPT:
        entry = Entry(kind=entry.kind, target=moved(entry.target), args=entry.args)
    plan = None if submission.plan is None else Path(moved(submission.plan))
    return dataclasses.replace(submission, entry=entry, plan=plan)


def _compose(submission: Submission) -> str:
    # In containers of one network every name is an address; in a compose file a dollar is written twice.
    names = ["master", *(f"worker-{number}" for number in range(1, submission.nodes))]
    services = {name: _service(submission, number, name) for number, name in enumerate(names)}
    whole: dict[str, Any] = {"name": submission.name, "services": services}
    if submission.nodes > 1:
        whole["secrets"] = {_SECRET: {"file": f"./{_SECRET}"}}
    head = [
        "# Made by torsh-distributed. Start it with: docker compose up --build --abort-on-container-failure",
        "# Several nodes share a secret; create it before, for the user of the container:",
        f"#   (umask 077 && openssl rand -hex 32 > {_SECRET})",
    ]
    return (
        "\n".join(head[: 3 if submission.nodes > 1 else 1]) + "\n" + yaml.safe_dump(whole, sort_keys=False, width=120)
    )


def _service(submission: Submission, number: int, name: str) -> dict[str, Any]:
    meeting: list[str] = []
    if submission.nodes > 1:
        meeting = ["--nnodes", str(submission.nodes), "--node-rank", str(number), "--master-addr", "master"]
        meeting += ["--token-file", f"/run/secrets/{_SECRET}"]
    command = ["--health", str(HEALTH_PORT), *meeting, *_words(submission)]
    service: dict[str, Any] = {
        "build": ".",
        "image": f"{submission.name}:latest",
        "hostname": name,
        "command": [word.replace("$", "$$") for word in command],
        "shm_size": quantity(submission.options.get("shm", "2G")).replace("i", "b").lower(),
        "stop_grace_period": "30s",
        "init": False,
        "cpus": float(submission.cpus_per_worker * submission.workers_per_node),
    }
    if submission.env:
        service["environment"] = {key: value.replace("$", "$$") for key, value in sorted(submission.env.items())}
    if submission.memory_per_worker is not None:
        amount = quantity(submission.memory_per_worker, times=submission.workers_per_node)
        service["mem_limit"] = amount.replace("i", "b").lower()
    if submission.gpus_per_worker:
        count = submission.gpus_per_worker * submission.workers_per_node
        device = {"driver": "nvidia", "count": count, "capabilities": ["gpu"]}
        service["deploy"] = {"resources": {"reservations": {"devices": [device]}}}
    if submission.nodes > 1:
        service["secrets"] = [_SECRET]
    return service
