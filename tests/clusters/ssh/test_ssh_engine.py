"""SSH as an engine: the command it runs, and hosts that are too few. Real jobs: test_same_losses, launch/ssh."""

from __future__ import annotations

from pathlib import Path

import pytest

from torsh_distributed.clusters.ssh.ssh_engine import SshEngine
from torsh_distributed.clusters.submission import Submission
from torsh_distributed.errors import CommunicationError, InvalidArgument
from torsh_distributed.launch.spec import ElasticSpec, Entry


def submission(**changes: object) -> Submission:
    values: dict[str, object] = {"entry": Entry(target="train.py", args=("--lr", "1")), "name": "job"}
    return Submission(**{**values, **changes})  # type: ignore[arg-type]


def test_the_job_gets_the_first_hosts_that_are_large_enough() -> None:
    engine = SshEngine({"hosts": "a:2,b:8,c", "port_range": "29500-29510"})
    shown = engine.render(
        submission(
            nodes=2,
            workers_per_node=4,
            env={"KEY": "hush-hush"},
            plan=Path("/plan.toml"),
            elastic=ElasticSpec(min_workers=2, max_workers=8),
        )
    )
    assert "run --ssh --hosts b:4,c:4 --port-range 29500-29510 --carry KEY --rdzv-id job --plan /plan.toml" in shown
    assert shown.endswith("--elastic --min-workers 2 --max-workers 8 --on-loss replace train.py --lr 1")
    assert "hush-hush" not in shown


def test_too_few_hosts_are_listed() -> None:
    with pytest.raises(CommunicationError, match=r"there are 1 of 2: a \(2 slots\), b"):
        SshEngine({"hosts": "a:2,b"}).render(submission(nodes=2, workers_per_node=4))


def test_what_ssh_cannot_give_is_refused() -> None:
    with pytest.raises(InvalidArgument, match="needs hosts"):
        SshEngine({})
    for changes in ({"memory_per_worker": "1G"}, {"gpus_per_worker": 2}):
        with pytest.raises(InvalidArgument, match="would have no effect"):
            SshEngine({"hosts": "a"}).render(submission(**changes))
