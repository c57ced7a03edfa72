"""Results: they survive the file, the page and the pictures follow from them, and what is kept is a full run."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from io import StringIO
from pathlib import Path

import pytest
import torch
import typer
from click.testing import Result as Invoked
from PIL import Image
from rich.console import Console
from typer.testing import CliRunner

from benchmarks.__main__ import main, part_named
from benchmarks.cases import case_names, load_case
from benchmarks.harness import QUICK, Budget, Case, Measurement, Note, Row, Unit
from benchmarks.machine import describe_machine
from benchmarks.page import PAGE, page_text, write_page
from benchmarks.plot import fingerprint, save_plot
from benchmarks.result import RESULTS, Result, beside_earlier, load_result, load_results, run_case, save_result
from benchmarks.table import table_of

pytestmark = pytest.mark.ranks


def measured(median: float) -> Measurement:
    return Measurement(median=median, low=median * 0.9, high=median * 1.2, num_samples=3)


def rows(budget: Budget) -> Iterator[Row | Note]:
    yield Row(name="one", unit=Unit.SECONDS, ours=measured(1e-6), rivals={"theirs": measured(3e-6)})
    yield Row(name="two", unit=Unit.PER_SECOND, ours=measured(2e3), rivals={"others": measured(4e3)})
    yield Note(text=f"measured on a {budget.name} budget")


@pytest.fixture
def result() -> Result:
    return run_case("sample", Case(title="A sample", about="Of\n    numbers.", rows=rows), QUICK)


def test_a_result_survives_the_file(result: Result, tmp_path: Path) -> None:
    path = save_result(result, tmp_path / "new")
    assert load_result(path) == result
    assert load_results(tmp_path / "new") == [result]
    assert json.loads(path.read_text())["rows"][0]["ratios"] == {"theirs": 3.0}


def test_samples_are_kept_where_their_distribution_matters(result: Result, tmp_path: Path) -> None:
    samples = (1e-3, 2e-3, 5e-3)
    spread = Row(name="three", unit=Unit.SECONDS, ours=replace(Measurement.of(samples), samples=samples))
    with_spread = replace(result, rows=(*result.rows, spread))
    path = save_result(with_spread, tmp_path)
    assert load_result(path) == with_spread
    assert ["samples" in row["ours"] for row in json.loads(path.read_text())["rows"]] == [False, False, True]
    assert save_plot(with_spread, tmp_path).exists()


def test_a_part_that_is_measured_alone_keeps_the_others_of_the_same_machine(result: Result, tmp_path: Path) -> None:
    earlier = replace(result, notes=("one: was slow", "two: was fast"))
    save_result(earlier, tmp_path)
    again = replace(result, rows=(replace(result.rows[0], ours=measured(9e-6)),), notes=("one: is slow",))
    merged = beside_earlier(again, tmp_path, ["one"])
    assert [(row.name, row.ours.median) for row in merged.rows] == [("two", 2e3), ("one", 9e-6)]
    assert merged.notes == ("two: was fast", "one: is slow")
    elsewhere = replace(again, machine=replace(again.machine, num_cores=999))
    assert beside_earlier(elsewhere, tmp_path, ["one"]) == elsewhere
    assert beside_earlier(again, tmp_path / "empty", ["one"]) == again


def test_the_machine_is_described() -> None:
    machine = describe_machine()
    assert machine.num_cores >= 1
    assert machine.memory_gb > 0.1
    assert machine.cpu
    assert machine.torch.startswith("2.")


def test_the_page_has_every_number_and_ratio(result: Result) -> None:
    page = page_text([result])
    assert "| one | **1.00 µs** | 3.00 µs | 3.00× |  |  |" in page
    assert "| two | **2.00 k/s** |  |  | 4.00 k/s | 0.50× |" in page
    assert "Of numbers." in page
    assert "> measured on a quick budget" in page
    assert "python -m benchmarks sample" in page


def test_the_table_warns_of_a_quick_run(result: Result) -> None:
    assert "do not quote" in str(table_of(result).caption)


def test_many_rivals_stand_below_each_other_on_a_narrow_terminal() -> None:
    rivals = {f"a rival with a long name, number {number}": measured(number * 1e-6) for number in range(1, 7)}
    crowded = Row(name="one", unit=Unit.SECONDS, ours=measured(1e-6), rivals=rivals)
    result = run_case("sample", Case(title="A sample", about="", rows=lambda _: iter([crowded])), QUICK)
    console = Console(width=80, record=True, file=StringIO())
    console.print(table_of(result))
    text = console.export_text()
    assert "…" not in text
    for number in range(1, 7):
        assert f"number {number} │ {number}.00 µs │ {number}.00×" in text


@pytest.mark.parametrize("x", [None, 1.0])
def test_a_picture_knows_its_numbers(result: Result, tmp_path: Path, x: float | None) -> None:
    placed = [Row(name=row.name, unit=row.unit, ours=row.ours, rivals=row.rivals, x=x) for row in result.rows]
    drawn = run_case("sample", Case(title="A sample", about="", rows=lambda _: iter(placed), x_label="x"), QUICK)
    with Image.open(save_plot(drawn, tmp_path)) as image:
        assert image.info["Source"] == fingerprint(drawn)
        assert image.width > 1000


def test_the_page_of_the_site_is_in_step_with_the_results() -> None:
    assert PAGE.read_text() == page_text(load_results()), "run `python -m benchmarks --page`"


def test_the_pictures_are_in_step_with_the_results() -> None:
    for result in load_results():
        with Image.open(RESULTS / f"{result.case}.png") as image:
            assert image.info["Source"] == fingerprint(result), "run `python -m benchmarks --page`"


def test_kept_results_are_full_runs_of_cases_that_exist() -> None:
    for result in load_results():
        assert result.case in case_names()
        assert result.budget == "full", result.case


def test_every_case_is_well_formed() -> None:
    assert {"bed", "events", "store"} <= set(case_names())
    for name in case_names():
        case = load_case(name)
        assert case.title
        assert case.about


def test_a_page_can_be_written_elsewhere(result: Result, tmp_path: Path) -> None:
    save_result(result, tmp_path)
    write_page(tmp_path / "page.md", tmp_path, redraw=True)
    assert (tmp_path / "page.md").read_text() == page_text([result])
    assert (tmp_path / "sample.png").exists()


def run(*args: str) -> Invoked:
    """The command, in this process: to import torch once more takes longer than what it does."""
    app = typer.Typer()
    app.command()(main)
    return CliRunner().invoke(app, args)


@pytest.fixture
def _kept_variable(monkeypatch: pytest.MonkeyPatch) -> None:
    """The command takes it away."""
    monkeypatch.delenv("PYTHONDONTWRITEBYTECODE", raising=False)


@pytest.mark.usefixtures("_kept_variable")
def test_an_unknown_case_proposes_the_nearest() -> None:
    done = run("evnts")
    assert done.exit_code == 2
    assert "did you mean events?" in " ".join(done.output.split())


def test_a_part_goes_by_its_beginning() -> None:
    case = load_case("chaos")
    assert part_named(case, "chaos", "storm") == "storm"
    assert part_named(case, "chaos", "sigkill in b") == "SIGKILL in backward"
    for wanted in ("SIGKILL", "flood"):
        with pytest.raises(
            typer.BadParameter, match="names no one part of the case chaos; there are: SIGKILL in backward"
        ):
            part_named(case, "chaos", wanted)


@pytest.mark.usefixtures("_kept_variable")
def test_a_gate_that_compares_nothing_is_not_passed(result: Result, tmp_path: Path) -> None:
    """codecs_cuda measures nothing without a GPU, and where there is one it has no row of that name."""
    done = run("codecs_cuda", "--quick", "--against", str(save_result(replace(result, case="codecs_cuda"), tmp_path)))
    assert done.exit_code == 1
    assert "nothing here can be compared with" in " ".join(done.output.split())


@pytest.mark.usefixtures("_kept_variable")
@pytest.mark.parametrize("name", [pytest.param("events", marks=pytest.mark.matrix), "codecs_cuda"])
def test_a_quick_run_is_kept_where_it_is_told_to_and_nowhere_else(name: str, tmp_path: Path) -> None:
    """`make benchcheck` runs every case; here two stand for them, one that needs what is not everywhere."""
    before = {path: path.stat().st_mtime_ns for path in RESULTS.glob("*")}
    done = run(name, "--quick", "--json", str(tmp_path))
    assert done.exit_code == 0, done.output
    if name.endswith("_cuda") and not torch.cuda.is_available():
        assert "nothing was measured, nothing is kept" in done.output
        assert not list(tmp_path.iterdir())
        return
    found = load_result(tmp_path / f"{name}.json")
    assert found.rows
    assert found.budget == "quick"
    assert (tmp_path / f"{name}.png").exists()
    assert {path: path.stat().st_mtime_ns for path in RESULTS.glob("*")} == before
