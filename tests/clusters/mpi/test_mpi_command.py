"""mpiexec's command lines: both kinds, no value of a variable on them."""

from __future__ import annotations

import pytest

from torsh_distributed.clusters.mpi.mpi_command import MpiLauncher, mpiexec_command, with_rank
from torsh_distributed.clusters.mpi.mpi_engine import MpiEngine
from torsh_distributed.clusters.submission import Submission
from torsh_distributed.errors import FeatureNotAvailable, InvalidArgument
from torsh_distributed.launch.spec import Entry


def submission(**changes: object) -> Submission:
    return Submission(entry=Entry(target="train.py"), name="job", **changes)  # type: ignore[arg-type]


def line(launcher: MpiLauncher, options: dict[str, str]) -> str:
    asked = submission(nodes=2, workers_per_node=4)
    words = mpiexec_command("mpiexec", launcher, asked, options, command=["python", "x.py"], variables=["B", "A"])
    return " ".join(words)


def test_each_launcher_gets_its_own_words() -> None:
    options = {"hosts": "a,b", "args": "-bind-to core"}
    assert line(MpiLauncher.MPICH, options) == (
        "mpiexec -n 8 -ppn 4 -prepend-rank -genvlist A,B -hosts a,b -bind-to core python x.py"
    )
    assert line(MpiLauncher.OPEN_MPI, options) == (
        "mpiexec -n 8 --map-by ppr:4:node:OVERSUBSCRIBE --tag-output -x A -x B --host a:4,b:4 -bind-to core python x.py"
    )


def test_labels_become_ranks() -> None:
    assert with_rank("[3] loss 1") == "[rank 3] loss 1"
    assert with_rank("[1,12]<stderr>:loss 1") == "[rank 12] loss 1"
    assert with_rank("[mpiexec@x] killed") == "[mpiexec@x] killed"


@pytest.mark.parametrize(
    ("changes", "options", "kind", "message"),
    [
        ({"nodes": 2}, {}, InvalidArgument, "--nodes 2 needs hosts"),
        ({}, {"hostfile": "h"}, InvalidArgument, "address of the first host"),
        ({"max_restarts": 1}, {}, FeatureNotAvailable, "ends with its first rank"),
        ({"memory_per_worker": "8G"}, {}, InvalidArgument, "has no scheduler"),
        ({}, {"mpiexec": "no-such-mpiexec"}, FeatureNotAvailable, "is not found"),
        ({}, {"mpiexec": "true"}, FeatureNotAvailable, "neither MPICH's nor Open MPI's"),
    ],
)
def test_what_cannot_work_is_refused(
    changes: dict[str, object], options: dict[str, str], kind: type[Exception], message: str
) -> None:
    with pytest.raises(kind, match=message):
        MpiEngine(options).render(submission(**changes))
