"""What was measured: between the points, in a file, and stale on another machine."""

from __future__ import annotations

import dataclasses
import itertools
import json
from pathlib import Path

import pytest

from tests.bed.world import World
from torsh_distributed.errors import ConfigurationError
from torsh_distributed.planner.machine.link_measuring import (
    OPERATIONS,
    Interference,
    measure_collectives,
    measure_interference,
)
from torsh_distributed.planner.machine.machine_file import FORMAT, MachineFile, Measurement, fingerprint
from torsh_distributed.planner.machine.measured_rates import (
    FAMILIES,
    CodecRate,
    OperationRates,
    ProductTable,
    SizeTable,
    family_of,
)
from torsh_distributed.planner.machine.this_machine import this_machine

LINE = SizeTable((1e3, 1e6), (1e-6, 1e-3))


def measurement(num_ranks: int = 2) -> Measurement:
    sides = (16, 256, 1024)
    cube = tuple(tuple(tuple(1e9 * (i + j + k + 1) for k in range(3)) for j in range(3)) for i in range(3))
    rates = OperationRates(
        products={"fp32": ProductTable(sides, cube)},
        attention={"fp32": LINE, "fp32 backward": LINE},
        families=dict.fromkeys(FAMILIES, LINE),
        launch_s=1e-6,
        backward_launch_s=2e-6,
        update=LINE,
    )
    return Measurement(
        num_ranks=num_ranks,
        date="2026-11-18",
        spread=0.04,
        rates=rates,
        collectives=dict.fromkeys(OPERATIONS, LINE),
        interference=Interference(1.5, 1.2, 0.3),
        codecs={"int8": CodecRate(travels="exchanged", share=0.25, encode=LINE, decode=LINE, average=LINE)},
    )


def test_seconds_are_on_the_line_between_measured_sizes_and_in_proportion_beyond() -> None:
    assert LINE.seconds_at(10) == 1e-6
    assert LINE.seconds_at((1e3 + 1e6) / 2) == pytest.approx((1e-6 + 1e-3) / 2)
    assert LINE.seconds_at(3e6) == pytest.approx(3e-3)


def test_a_rate_is_that_of_the_grid_at_its_points_and_between_its_neighbours_elsewhere() -> None:
    table = measurement().rates.products["fp32"]
    for i, j, k in itertools.product(range(3), repeat=3):
        sides = (table.sides[i], table.sides[j], table.sides[k])
        assert table.rate(*sides) == pytest.approx(table.flops_per_s[i][j][k])
    assert table.rate(16, 16, 16) < table.rate(64, 16, 16) < table.rate(256, 16, 16)
    # As long as a product of 16: operations of a thinner one come at a lower rate.
    assert table.rate(4, 1024, 1024) == pytest.approx(table.rate(16, 1024, 1024) / 4)
    assert table.rate(4, 4, 4) == pytest.approx(table.rate(16, 16, 16) / 64)
    assert table.rate(9000, 9000, 9000) == pytest.approx(table.rate(1024, 1024, 1024))


def test_every_operation_has_a_family() -> None:
    assert family_of("native_layer_norm_backward") == "norm backward"
    assert family_of("exp_") == "activation"
    assert family_of("bernoulli_") == "random"
    assert family_of("pow") == "power"
    assert family_of("mul") == "elementwise"


def test_a_file_gives_back_what_was_measured_and_is_used_for_its_number_of_ranks(tmp_path: Path) -> None:
    path = tmp_path / "machine.json"
    MachineFile(fingerprint(), {2: measurement()}).save(path)
    assert MachineFile.load(path).by_ranks == {2: measurement()}
    machine = this_machine(2, path=path)
    assert machine.rates == measurement().rates
    assert machine.not_measured("fp32", num_ranks=2) == []
    assert machine.not_measured("fp32") == ["latency and bandwidth between nodes"]
    assert machine.overlap.value == 0.3
    assert machine.near.ring_s(1e6, 2, laps=2) == pytest.approx(1e-3)
    assert "spread 4%" in machine.memory_rate.source
    assert this_machine(1, path=path).rates is None


def test_a_file_of_another_machine_is_said_to_be_stale_and_not_used(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "machine.json"
    MachineFile({**fingerprint(), "torch": "1.0"}, {2: measurement()}).save(path)
    assert this_machine(2, path=path).rates is None
    assert "torch: 1.0 then" in caplog.text


FORGED = {
    ("spread",): "x",
    ("num_ranks",): None,
    ("rates", "update"): {"sizes": [], "seconds": []},
    ("rates", "launch_s"): [1],
    ("rates", "attention", "fp32"): {"sizes": [1, 2], "seconds": [1]},
    ("rates", "families", "elementwise"): {"sizes": [2, 2], "seconds": [1, 1]},
    ("collectives", "all_reduce"): {"sizes": [1, 2], "seconds": [1, float("nan")]},
    ("rates", "products", "fp32", "sides"): [16, 256],
    ("rates", "products", "fp32", "flops_per_s"): [[[0.0] * 3] * 3] * 3,
    ("interference", "overlap"): "much",
}


@pytest.mark.parametrize("path", FORGED, ids=".".join)
def test_a_forged_number_is_refused_when_it_is_read(tmp_path: Path, path: tuple[str, ...]) -> None:
    found = dataclasses.asdict(measurement())
    inside = found
    for key in path[:-1]:
        inside = inside[key]
    inside[path[-1]] = FORGED[path]
    file = tmp_path / "machine.json"
    file.write_text(json.dumps({"format": FORMAT, "fingerprint": fingerprint(), "by_ranks": {"2": found}}))
    with pytest.raises(ConfigurationError, match="does not describe a measured machine"):
        MachineFile.load(file)


@pytest.mark.parametrize(
    "change", [{"format": 9}, {"by_ranks": {"2": {}}}, {"by_ranks": {"x": {}}}, {"fingerprint": None}, {"by_ranks": 3}]
)
def test_a_broken_file_is_refused_in_a_sentence(tmp_path: Path, change: dict[str, object]) -> None:
    path = tmp_path / "machine.json"
    document = {"format": FORMAT, "fingerprint": fingerprint(), "by_ranks": {"2": dataclasses.asdict(measurement())}}
    path.write_text(json.dumps({**document, **change}))
    with pytest.raises(ConfigurationError, match=r"does not describe a measured machine(.|\n)*torsh bench machine"):
        MachineFile.load(path)


def measured_links() -> tuple[dict[str, SizeTable], Interference]:
    """Runs on every rank."""
    return measure_collectives(0.01), measure_interference()


@pytest.mark.ranks
def test_links_are_measured_alike_on_every_rank(world: World) -> None:
    first, second = world.run(measured_links, num_ranks=2)
    assert first[0] == second[0]
    assert first[1].overlap == second[1].overlap
    assert set(first[0]) == set(OPERATIONS)
    assert all(seconds > 0 for table in first[0].values() for seconds in table.seconds)
    assert 0 <= first[1].overlap <= 1
