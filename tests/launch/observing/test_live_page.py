"""A job that trains, looked at in a real Chromium: the page follows it to its end, and an alert is acknowledged."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.bed.ports import free_port
from tests.launch.observing.test_job_observer import start
from tests.observe.page.chromium import Chromium

pytestmark = [pytest.mark.ranks, pytest.mark.matrix, pytest.mark.needs_browser]

LOOP = """
    import os, sys, time, torch, torch.distributed as dist
    from torch.utils.data import DataLoader
    dist.init_process_group("shm")
    model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(64, 64))
    criterion = torch.nn.MSELoss()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.25)
    go = torch.zeros(1)
    while not go:
        for batch in DataLoader(torch.randn(160, 64), batch_size=8):
            criterion(model(batch), batch).backward()
            optimizer.step()
            optimizer.zero_grad()
            time.sleep(0.01)
        go[0] = float(os.path.exists(sys.argv[1]))
        dist.broadcast(go, 0)
    dist.destroy_process_group()
"""
RULES = """
[[rule]]
name = "steps are done"
metric = "torsh_step"
operator = ">"
value = 0
severity = "critical"
"""


def test_the_page_of_a_running_job_is_live_and_alerts_are_acknowledged_on_it(tmp_path: Path) -> None:
    (tmp_path / "alerts.toml").write_text(RULES)
    port = free_port()
    job = start(tmp_path, LOOP, "--dashboard", "--dashboard-port", str(port), "--alerts", "alerts.toml")
    with Chromium(tmp_path) as browser:
        try:
            for _ in range(200):
                browser.open(f"http://127.0.0.1:{port}/")
                if browser.ask("document.querySelector('main') !== null"):
                    break
                assert job.poll() is None, job.communicate()
            browser.until("document.querySelectorAll('#ranks [data-rank]').length === 2")
            browser.until("document.querySelector('#loss [data-points]') !== null")
            # A plain loop without a word of this library: its loss, its batches and its arithmetic are seen.
            shown = "[...document.querySelectorAll('#parts [data-part]')].map((one) => one.dataset.part)"
            browser.until(f"['forward', 'backward', 'data'].every((one) => {shown}.includes(one))")
            first = int(browser.text("#figures li b").replace(",", ""))
            browser.until(f"Number(document.querySelector('#figures li b').innerText.replace(',', '')) > {first}")
            browser.click("[data-rank='0']")
            browser.until("document.querySelector('#rank').innerText.includes('GFLOP/s')")
            browser.until("document.querySelector('[data-alert]') !== null")
            browser.click("[data-alert]")
            browser.until("document.querySelector('#alerts').innerText.includes('acknowledged')")
            (tmp_path / "stop").touch()
            browser.until("document.querySelector('#summary').innerText.startsWith('finished')")
            assert not [one for one in browser.problems if "ERR_" not in one], browser.problems
        finally:
            (tmp_path / "stop").touch()
            output, errors = job.communicate(timeout=60)
    assert job.returncode == 0, (output, errors)
