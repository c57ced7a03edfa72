"""What happens to a job when a node of a real Ray cluster is lost with all that ran there."""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tests.clusters import rank_functions
from tests.clusters.engine_marks import RAY
from tests.clusters.ray.conftest import quiet_ray
from torsh_distributed.clusters.ray import RayConfig, run_training
from torsh_distributed.launch.spec import ElasticSpec

pytestmark = [*RAY, pytest.mark.ranks, pytest.mark.matrix]


def test_after_a_node_is_lost_the_ranks_of_the_others_go_on_in_place(tmp_path: Path) -> None:
    """Two nodes, each a raylet of its own on this machine, with room for one rank; one node is killed."""
    with quiet_ray(tmp_path) as ray, ThreadPoolExecutor(1) as pool:
        from ray.cluster_utils import Cluster

        cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 1, "include_dashboard": False})
        try:
            other = cluster.add_node(num_cpus=1)
            ray.init(address=cluster.address, log_to_driver=False)
            job = pool.submit(
                run_training,
                rank_functions.train,
                kwargs={"steps": 1_000_000, "until_size": 1, "marker": str(tmp_path / "trains")},
                num_workers=2,
                config=RayConfig(placement="STRICT_SPREAD"),
                elastic=ElasticSpec(min_workers=1, max_workers=2, on_loss="shrink"),
            )
            deadline = time.monotonic() + 120
            while not (tmp_path / "trains").exists():
                assert time.monotonic() < deadline
                assert not job.done(), job.result()
                time.sleep(0.05)
            cluster.remove_node(other, allow_graceful=False)
            (survivor,) = job.result(timeout=150)
        finally:
            ray.shutdown()
            cluster.shutdown()
    assert survivor["sizes"] == [1, 2]
