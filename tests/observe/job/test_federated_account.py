"""Rounds of a federated run reach the page, the report and the metrics, by the files of their events."""

from __future__ import annotations

import json
import math
from pathlib import Path

from tests.federated.small_task import SmallTask
from torsh_distributed import events
from torsh_distributed.events import JsonlSink, to_record
from torsh_distributed.federated import Availability, FederatedConfig, simulate
from torsh_distributed.observe.job.job_view import JobView
from torsh_distributed.observe.job.page_state import page_state
from torsh_distributed.observe.job.run_files import EventFiles
from torsh_distributed.observe.metrics.catalogue import CATALOGUE
from torsh_distributed.observe.page.html_report import html_report


def test_rounds_are_on_the_page_in_the_report_and_in_metrics(tmp_path: Path) -> None:
    config = FederatedConfig(rounds=5, clients_per_round=4, upload="topk:0.1")
    with JsonlSink(tmp_path):
        done = simulate(SmallTask(), num_clients=6, config=config, availability=Availability(dropout=0.3)).rounds
    view = EventFiles(tmp_path).read_all()
    state = page_state(view)
    shown = state["federated"]
    assert [row["num_updates"] for row in shown["rounds"]] == [record.num_updates for record in done]
    assert shown["num_planned"] == 5
    assert shown["bytes_up"] == sum(record.bytes_up for record in done)
    assert shown["rounds"][-1]["figures"] == done[-1].figures
    assert state["job"]["state"] == "finished"
    values = view.job_values()
    assert values["torsh_federated_rounds", ()] == 5
    assert values["torsh_federated_lost_updates", ()] == sum(sum(record.failures.values()) for record in done) > 0
    assert values["torsh_federated_bytes", ("down",)] == sum(record.bytes_down for record in done)
    assert values["torsh_federated_figure", ("norm",)] == done[-1].figures["norm"]
    assert all(name in CATALOGUE for name, _ in values)
    assert '"num_planned": 5' in html_report(state)


def test_figures_that_are_not_finite_can_be_shown() -> None:
    event = events.FederatedRoundEvent(
        round=0,
        num_chosen=1,
        num_updates=1,
        num_attempts=1,
        failures={},
        figures={"loss": math.nan},
        bytes_up=1,
        bytes_down=1,
        duration_s=0.1,
        epsilon=math.inf,
    )
    view = JobView()
    view.take(json.loads(json.dumps(to_record(event))))
    assert '"loss": null' in html_report(page_state(view))
    view.take({**to_record(event), "figures": {"loss": "high"}})
    view.take({**to_record(event), "failures": [1]})
    assert view.num_dropped == 2


def test_the_slowest_links_of_a_round_are_on_the_page_and_in_metrics() -> None:
    view = JobView()
    for number in range(2):
        event = events.FederatedRoundEvent(
            round=number,
            num_chosen=30,
            num_updates=30,
            num_attempts=1,
            failures={},
            figures={},
            bytes_up=1,
            bytes_down=1,
            duration_s=0.1,
            links={f"d-{client}": 1000.0 * (30 - client) + number for client in range(30)},
        )
        view.take(json.loads(json.dumps(to_record(event))))
    links = page_state(view)["federated"]["rounds"][-1]["links"]
    assert list(links.items())[:2] == [("d-29", 1001.0), ("d-28", 2001.0)]
    found = {key: value for key, value in view.job_values().items() if "link" in key[0]}
    assert found == {("torsh_federated_link_bytes_per_second", (name,)): rate for name, rate in links.items()}
    assert len(found) == 20


def test_a_run_that_is_not_over_is_running(tmp_path: Path) -> None:
    directory = tmp_path / "rounds"
    config = FederatedConfig(rounds=3, clients_per_round=2)

    class Interrupted(Exception):
        pass

    def interrupt(record: object) -> None:
        raise Interrupted

    with JsonlSink(tmp_path / "events"):
        try:
            simulate(SmallTask(), num_clients=2, config=config, directory=directory, on_round=interrupt)
        except Interrupted:
            pass
        else:
            raise AssertionError("it was interrupted")
    state = page_state(EventFiles(tmp_path / "events").read_all())
    assert state["job"]["state"] == "running"
    assert state["federated"]["num_rounds"] == 1
