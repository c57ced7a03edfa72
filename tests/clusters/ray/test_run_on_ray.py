"""Ranks as actors of a real local Ray. The quick tests share one cluster; the long ones are of the matrix."""

from __future__ import annotations

import os
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from tests.clusters import rank_functions
from tests.clusters.engine_marks import RAY
from torsh_distributed.clusters.ray import RayConfig, run_training
from torsh_distributed.errors import (
    ConfigurationError,
    FeatureNotAvailable,
    OperationTimeout,
    ProcessFailure,
    SerializationError,
)
from torsh_distributed.launch.spec import ElasticSpec

pytestmark = [*RAY, pytest.mark.ranks]


def await_end(pid: int) -> None:
    """Return when there is no such process: Ray says that an actor is dead a moment before its process is."""
    deadline = time.monotonic() + 60
    while Path(f"/proc/{pid}").exists():
        assert time.monotonic() < deadline, f"process {pid} still runs"
        time.sleep(0.02)


def assert_all_free(ray: Any) -> None:
    """All that the job reserved is free again, within the moment that Ray takes to count."""
    deadline = time.monotonic() + 60
    while ray.available_resources().get("CPU") != 4.0:
        assert time.monotonic() < deadline, ray.available_resources()
        time.sleep(0.05)


@pytest.mark.slow
def test_ranks_are_actors_that_share_memory_and_leave_nothing(ray_cluster: Any) -> None:
    """A world of two, and what is refused before anything starts; each start of actors takes seconds."""
    found = run_training(rank_functions.describe, num_workers=2)
    assert [one["rank"] for one in found] == [0, 1]
    assert [one["local_rank"] for one in found] == [0, 1]
    assert {one["sum"] for one in found} == {3.0}
    assert {(one["source"], one["backend"], one["world_size"], one["has_token"]) for one in found} == {
        ("Ray", "torsh", 2, False)
    }
    assert len({one["pid"] for one in found} | {os.getpid()}) == 3

    with pytest.raises(FeatureNotAvailable, match="the cluster has room for 4") as small:
        run_training(rank_functions.describe, num_workers=5)
    assert "CPU 4" in (small.value.hint or "")
    with pytest.raises(SerializationError, match="argument 0"):
        run_training(rank_functions.fail_on, args=(threading.Lock(),), num_workers=2)
    assert_all_free(ray_cluster)
    for one in found:
        await_end(one["pid"])


@pytest.mark.slow
def test_a_python_of_rays_without_this_library_is_told_with_what_to_do(ray_cluster: Any, tmp_path: Path) -> None:
    (tmp_path / "torsh_distributed.py").write_text(
        "raise ModuleNotFoundError(\"No module named 'torsh_distributed'\", name='torsh_distributed')\n"
    )
    bare = RayConfig(runtime_env={"env_vars": {"PYTHONPATH": str(tmp_path)}})
    with pytest.raises(ConfigurationError, match="cannot be imported by Ray's workers") as missing:
        run_training(rank_functions.describe, num_workers=1, config=bare)
    assert 'runtime_env={"pip": ["torsh-distributed[ray]"]}' in (missing.value.hint or "")
    assert_all_free(ray_cluster)


@pytest.mark.matrix
def test_a_rank_that_raises_is_named_with_its_traceback(ray_cluster: Any) -> None:
    with pytest.raises(ProcessFailure, match=r"rank 1 on Ray worker .* failed: ValueError: a mistake") as failed:
        run_training(rank_functions.fail_on, args=(1,), num_workers=3)
    assert "in fail_on" in "".join(failed.value.__notes__)
    assert isinstance(failed.value.__cause__, ValueError)
    assert_all_free(ray_cluster)


@pytest.mark.matrix
def test_after_a_rank_is_killed_all_start_again(ray_cluster: Any, tmp_path: Path) -> None:
    lost = run_training(rank_functions.die_once, args=(str(tmp_path / "died"), 1), num_workers=2, max_restarts=1)
    assert lost == [1, 1]


@pytest.mark.matrix
def test_a_stranger_without_the_secret_is_not_let_in(ray_cluster: Any) -> None:
    assert "let in" not in run_training(rank_functions.try_without_secret, num_workers=2)


@pytest.mark.matrix
def test_an_elastic_job_goes_on_in_place_with_the_losses_of_an_undisturbed_one(
    ray_cluster: Any, tmp_path: Path
) -> None:
    undisturbed = run_training(rank_functions.train, num_workers=3)
    disturbed = run_training(
        rank_functions.train,
        kwargs={"die_at": 3},
        num_workers=3,
        elastic=ElasticSpec(min_workers=1, max_workers=3, on_loss="shrink"),
    )
    assert [one["member"] for one in disturbed] == [0, 2]
    assert disturbed[0]["sizes"] == [2, 3]
    for step, loss in undisturbed[0]["losses"].items():
        assert disturbed[0]["losses"][step] == pytest.approx(loss, rel=1e-5)


@pytest.mark.matrix
def test_a_replacement_joins_the_running_world(ray_cluster: Any, tmp_path: Path) -> None:
    ended = run_training(
        rank_functions.train,
        kwargs={"die_at": 2, "steps": 6},
        num_workers=2,
        elastic=ElasticSpec(min_workers=1, max_workers=2, on_loss="wait"),
    )
    assert [one["member"] for one in ended] == [0, 2]
    assert ended[0]["sizes"] == [2]
    assert sorted(ended[0]["losses"]) == list(range(6))
    assert ended[1]["losses"][5] == pytest.approx(ended[0]["losses"][5])


@pytest.mark.matrix
def test_without_recovery_in_place_all_go_on_from_the_checkpoint(ray_cluster: Any, tmp_path: Path) -> None:
    undisturbed = run_training(rank_functions.train, num_workers=2)
    again = run_training(
        rank_functions.train,
        kwargs={"die_at": 4, "directory": str(tmp_path / "checkpoints")},
        num_workers=2,
        max_restarts=1,
    )
    assert 0 < again[0]["first"] <= 4
    for step, loss in again[0]["losses"].items():
        assert loss == pytest.approx(undisturbed[0]["losses"][step], rel=1e-5)


@pytest.mark.matrix
def test_an_elastic_job_takes_the_workers_that_there_are(ray_cluster: Any) -> None:
    ended = run_training(
        rank_functions.train,
        num_workers=6,
        config=RayConfig(cpus_per_worker=2),
        elastic=ElasticSpec(min_workers=1, max_workers=6),
    )
    assert ended[0]["sizes"] == [2]


@pytest.mark.matrix
def test_room_that_others_hold_is_waited_for_and_then_named(ray_cluster: Any) -> None:
    from ray.util.placement_group import placement_group, remove_placement_group

    others = placement_group([{"CPU": 3}])
    assert others.wait(30)
    try:
        with pytest.raises(OperationTimeout, match="had no room for 2 workers") as full:
            run_training(rank_functions.describe, num_workers=2, config=RayConfig(start_timeout_s=2.0))
        assert "free now: CPU 1" in (full.value.hint or "")
    finally:
        remove_placement_group(others)


@pytest.mark.matrix
def test_a_job_past_its_time_is_ended(ray_cluster: Any, tmp_path: Path) -> None:
    with pytest.raises(OperationTimeout, match="did not end within its"):
        run_training(rank_functions.wait_forever, args=(str(tmp_path),), num_workers=2, time_limit_s=20.0)
    assert_all_free(ray_cluster)
    for path in tmp_path.iterdir():
        await_end(int(path.read_text()))


@pytest.mark.matrix
def test_custom_resources_and_a_node_for_each_are_checked_before_anything_starts(ray_cluster: Any) -> None:
    with pytest.raises(FeatureNotAvailable, match="room for 0"):
        run_training(rank_functions.describe, num_workers=1, config=RayConfig(resources_per_worker={"rare": 1}))
    with pytest.raises(FeatureNotAvailable, match=r"STRICT_SPREAD.*room for 1"):
        run_training(rank_functions.describe, num_workers=2, config=RayConfig(placement="STRICT_SPREAD"))
