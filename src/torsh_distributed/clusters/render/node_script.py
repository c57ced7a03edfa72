"""What a cloud's machine runs at its first start: find its place, fetch the secret, run `torsh run` in a container."""

from __future__ import annotations

import dataclasses
import shlex
from collections.abc import Mapping, Sequence

from torsh_distributed.clusters.engine_options import require_known_options
from torsh_distributed.clusters.kubernetes.kubernetes_options import quantity
from torsh_distributed.clusters.render.rendered_files import RenderedFile, folded
from torsh_distributed.clusters.run_arguments import entry_arguments
from torsh_distributed.clusters.submission import Submission
from torsh_distributed.errors import InvalidArgument
from torsh_distributed.launch.spec import Entry, EntryKind

COMMON_SETTINGS = {
    "image": "the container image with the script in it (required); `torsh render docker` writes a Dockerfile",
    "instance_type": "the kind of machine",
    "spot": "yes for machines that the cloud may take back, at a lower price (no)",
    "shm": "the size of /dev/shm (16G)",
    "user": "the number of the user in the container (1000)",
}
NOT_DEPLOYED = (
    "# Made by torsh-distributed. Read it before you run it: it creates machines that cost money.\n"
    "# It is linted and its parts are tested; it has not been run against the cloud by those who wrote it."
)

FIELD_FUNCTION = (
    "# field NAME: that text of a JSON object, without needing a program for JSON on the machine",
    """field() { sed -n 's/.*"'"$1"'" *: *"\\([^"]*\\)".*/\\1/p' | head -n 1; }""",
)


def read_settings(cloud: str, submission: Submission, own: Mapping[str, str], *required: str) -> dict[str, str]:
    """The settings, after a check that those that are required are there."""
    require_known_options(cloud, submission.options, {**COMMON_SETTINGS, **own})
    for key in ("image", *required):
        if not submission.options.get(key):
            meaning = {**COMMON_SETTINGS, **own}[key]
            raise InvalidArgument(f"{cloud} needs --set {key}=…", hint=meaning, setting=key)
    if submission.options.get("spot", "no") not in ("yes", "no"):
        raise InvalidArgument("spot must be yes or no", spot=submission.options["spot"])
    if submission.plan is not None or submission.entry.kind is EntryKind.SCRIPT:
        _check_paths(submission)
    return dict(submission.options)


def _check_paths(submission: Submission) -> None:
    """Files are those of the image: their paths must not be this machine's."""
    for path in filter(None, (submission.plan, submission.entry.target)):
        text = str(path)
        if submission.entry.kind is EntryKind.SCRIPT and text.startswith(str(submission.working_dir) + "/"):
            continue
        if text.startswith("/") and not text.startswith("/workspace/"):
            raise InvalidArgument(
                f"{text} is a path of this machine; in the image files lie in /workspace",
                hint="give paths relative to the folder that the image was built from",
            )


def is_spot(options: Mapping[str, str]) -> bool:
    """Whether machines may be taken back."""
    return options.get("spot", "no") == "yes"


def node_file(submission: Submission, cloud: str, place: Sequence[str], *, devices: Sequence[str] = ()) -> RenderedFile:
    """`node.sh`. `place` are the cloud's lines, which set `node_rank` and `master` and write `$token`."""
    return RenderedFile("node.sh", _node_script(submission, cloud, place, devices), is_program=True)


def _node_script(submission: Submission, cloud: str, place: Sequence[str], devices: Sequence[str]) -> str:
    options = submission.options
    user = options.get("user", "1000")
    container = ["docker", "run", "--rm", "--name", "torsh", "--network", "host"]
    container += ["--shm-size", quantity(options.get("shm", "16G")).replace("i", "").lower()]
    container += ["--ulimit", "memlock=-1", "--stop-timeout", "60", "--user", shlex.quote(user)]
    container += ["--gpus", "all"] if submission.gpus_per_worker else []
    container += ["--volume", '"$token:/run/secrets/job.token:ro"']
    for name, value in sorted(submission.env.items()):
        container += ["--env", shlex.quote(f"{name}={value}")]
    container += [*devices, "--entrypoint", "torsh", shlex.quote(options["image"]), "run"]
    run = ["--nnodes", str(submission.nodes), "--node-rank", '"$node_rank"', "--master-addr", '"$master"']
    run += ["--nproc-per-node", str(submission.workers_per_node), "--token-file", "/run/secrets/job.token"]
    run += ["--spot-notice", cloud] if is_spot(options) else []
    run += list(map(shlex.quote, entry_arguments(_in_image(submission))))
    lines = [
        "#!/bin/bash",
        NOT_DEPLOYED,
        f"# Runs on every machine of {submission.name}, as root, when it first starts.",
        "set -euo pipefail",
        "",
        "install -d -m 0755 /run/torsh",
        "token=/run/torsh/job.token",
        "umask 077",
        *place,
        f'chown {shlex.quote(user)} "$token"',
        "",
        "exec " + folded([*container, *run]),
    ]
    return "\n".join(lines) + "\n"


def _in_image(submission: Submission) -> Submission:
    def moved(text: str) -> str:
        inside = text.removeprefix(str(submission.working_dir) + "/")
        return inside if inside.startswith("/") else f"/workspace/{inside}"

    entry, plan = submission.entry, submission.plan
    if entry.kind is EntryKind.SCRIPT:
        entry = Entry(kind=entry.kind, target=moved(entry.target), args=entry.args)
    if plan is not None:
        plan = type(plan)(moved(str(plan)))
    return dataclasses.replace(submission, entry=entry, plan=plan)


def up_or_down(up: Sequence[str], down: Sequence[str]) -> list[str]:
    """The end of a script that makes a cluster, or removes it."""
    return [
        'case "${1:-}" in',
        "up)",
        *(f"  {line}" if line else "" for line in up),
        "  ;;",
        "down)",
        *(f"  {line}" if line else "" for line in down),
        "  ;;",
        "*)",
        '  echo "usage: $0 up|down" >&2',
        "  exit 2",
        "  ;;",
        "esac",
    ]


def launch_script(cloud: str, settings: Mapping[str, str], body: Sequence[str]) -> RenderedFile:
    """`launch-CLOUD.sh`: what can be changed on top, then the commands."""
    lines = ["#!/bin/bash", NOT_DEPLOYED, "set -euo pipefail", ""]
    lines += [f"{name}={_quoted(value)}" for name, value in settings.items()]
    lines += ['here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)', "", *body]
    return RenderedFile(f"launch-{cloud}.sh", "\n".join(lines) + "\n", is_program=True)


def _quoted(value: str) -> str:
    """Always in quotes: a value such as subnet-1 looks like arithmetic to a linter."""
    return "'" + value.replace("'", "'\\''") + "'"
