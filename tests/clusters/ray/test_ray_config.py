from __future__ import annotations

import pytest

from torsh_distributed.clusters.ray.ray_config import RayConfig, most_that_fit
from torsh_distributed.errors import InvalidArgument

NODES = [{"CPU": 4.0, "GPU": 1.0}, {"CPU": 2.0}, {"CPU": 1.0, "fast": 1.0}]


@pytest.mark.parametrize(
    ("bundle", "placement", "count"),
    [
        ({"CPU": 1}, "PACK", 7),
        ({"CPU": 2}, "SPREAD", 3),
        ({"CPU": 2}, "STRICT_PACK", 2),
        ({"CPU": 2}, "STRICT_SPREAD", 2),
        ({"CPU": 1, "GPU": 1}, "PACK", 1),
        ({"fast": 0.5}, "PACK", 2),
        ({"CPU": 8}, "PACK", 0),
    ],
)
def test_how_many_workers_fit_depends_on_bundle_and_placement(
    bundle: dict[str, float], placement: str, count: int
) -> None:
    assert most_that_fit(NODES, bundle, placement) == count  # type: ignore[arg-type]


def test_a_bundle_has_what_a_worker_reserves_and_nothing_else() -> None:
    config = RayConfig(cpus_per_worker=2, memory_per_worker_bytes=5, resources_per_worker={"fast": 1})
    assert config.bundle == {"CPU": 2, "memory": 5, "fast": 1}


@pytest.mark.parametrize("wrong", [{"placement": "CLOSE"}, {"cpus_per_worker": -1}, {"start_timeout_s": 0}])
def test_impossible_settings_are_refused(wrong: dict[str, object]) -> None:
    with pytest.raises(InvalidArgument):
        RayConfig(**wrong)  # type: ignore[arg-type]
