"""What `torsh render` can write, by name."""

from __future__ import annotations

import difflib
import importlib
from collections.abc import Callable
from dataclasses import dataclass

from torsh_distributed.clusters.render.rendered_files import RenderedFile
from torsh_distributed.clusters.submission import Submission
from torsh_distributed.errors import InvalidArgument

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
    "aws": Renderer(f"{_HERE}.aws_script:render_aws", "", "scripts for EC2: placement group, EFA, spot"),
    "gcp": Renderer(f"{_HERE}.gcp_script:render_gcp", "", "scripts for Compute Engine: compact placement, gVNIC, spot"),
    "azure": Renderer(f"{_HERE}.azure_script:render_azure", "", "scripts for a VM scale set: InfiniBand, spot"),
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
        from torsh_distributed.clusters.engines import open_engine

        return [RenderedFile(chosen.file, open_engine(function, submission.options).render(submission))]
    make: Render = getattr(importlib.import_module(home), function)
    return make(submission)
