"""What a renderer makes: named texts, some of them to be run; and how they are written down."""

from __future__ import annotations

import difflib
import importlib
import os
import re
import shlex
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from torsh_distributed.clusters.submission import Submission
from torsh_distributed.errors import InvalidArgument, IoError

_PLAIN_VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")


@dataclass(frozen=True, slots=True)
class RenderedFile:
    """One file."""

    name: str
    text: str
    is_program: bool = False


def write_files(files: Iterable[RenderedFile], folder: Path, *, replaces: bool) -> list[Path]:
    """Write the files; one that is there already is an error before anything is written, unless it `replaces`."""
    files = list(files)
    there = [str(folder / one.name) for one in files if (folder / one.name).exists()]
    if there and not replaces:
        raise InvalidArgument(f"{', '.join(there)} exists already", hint="--force replaces it", path=there[0])
    written = []
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for one in files:
            path = folder / one.name
            draft = path.with_name(f".{one.name}.{os.getpid()}")
            draft.write_text(one.text)
            draft.chmod(0o755 if one.is_program else 0o644)
            draft.replace(path)
            written.append(path)
    except OSError as error:
        raise IoError(f"{folder} cannot be written: {error.strerror or error}", path=str(folder)) from error
    return written


def exported(variables: dict[str, str]) -> list[str]:
    """Lines of shell that set variables."""
    for name in variables:
        if not _PLAIN_VARIABLE.fullmatch(name):
            raise InvalidArgument("a variable's name has letters, digits and '_'", variable=name)
    return [f"export {name}={shlex.quote(value)}" for name, value in sorted(variables.items())]


def folded(words: Sequence[str], *, indent: str = "  ") -> str:
    """A command over several lines, each begun by an option; words are taken as they are, so quote them before."""
    lines: list[str] = []
    for word in words:
        if not lines:
            lines.append(word)
        elif word.startswith("-"):
            lines.append(f"{indent}{word}")
        else:
            lines[-1] += f" {word}"
    return " \\\n".join(lines)


Render = Callable[[Submission], list[RenderedFile]]


@dataclass(frozen=True, slots=True)
class Renderer:
    """Where a renderer is, and what it writes."""

    home: str
    """`module:function`, or the name of an engine whose own rendering it is, as `engine:slurm`."""
    file: str
    """The name of an engine's file."""
    summary: str


_HERE = "torsh_distributed.clusters.render"
RENDERERS: dict[str, Renderer] = {
    "slurm": Renderer("engine:slurm", "job.sbatch", "a script for sbatch"),
    "mpi": Renderer(f"{_HERE}.mpi_script:render_mpi", "", "a script around mpirun or mpiexec"),
    "k8s": Renderer("engine:k8s", "job.yaml", "manifests for kubectl: a Job, JobSet, TrainJob or PyTorchJob"),
    "pbs": Renderer(f"{_HERE}.pbs_script:render_pbs", "", "a script for qsub"),
    "docker": Renderer(f"{_HERE}.container_files:render_docker", "", "a Dockerfile"),
    "compose": Renderer(
        f"{_HERE}.container_files:render_compose", "", "a compose file of a master and workers, its Dockerfile"
    ),
    "aws": Renderer(f"{_HERE}.cloud_scripts:render_aws", "", "scripts for EC2: placement group, EFA, spot"),
    "gcp": Renderer(f"{_HERE}.cloud_scripts:render_gcp", "", "scripts for Compute Engine: placement, gVNIC, spot"),
    "azure": Renderer(f"{_HERE}.cloud_scripts:render_azure", "", "scripts for a VM scale set: InfiniBand, spot"),
}


def render(name: str, submission: Submission) -> list[RenderedFile]:
    """The files; asks nobody. Raises InvalidArgument for an unknown name or setting."""
    if name not in RENDERERS:
        near = difflib.get_close_matches(name, RENDERERS, n=1)
        raise InvalidArgument(
            f"nothing is rendered for {name!r}",
            hint=f"did you mean {near[0]!r}?" if near else f"there are {', '.join(RENDERERS)}",
        )
    chosen = RENDERERS[name]
    home, _, function = chosen.home.partition(":")
    if home == "engine":
        from torsh_distributed.clusters.registry import open_engine

        return [RenderedFile(chosen.file, open_engine(function, submission.options).render(submission))]
    make: Render = getattr(importlib.import_module(home), function)
    return make(submission)
