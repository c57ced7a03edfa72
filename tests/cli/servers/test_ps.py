"""A server that runs outside of a job, which trains with it by its name."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import nn

TRAIN = """
import sys
import torch
import torsh_distributed as td
from torsh_distributed import rpc

url = sys.argv[1]
td.init()
rpc.start("trainer", store=url)
rpc.wait_for_workers(["ps0"])
torch.manual_seed(3)
net = torch.nn.Linear(6, 1)
plan = td.Plan(
    server={"training": "asynchronous", "names": ["ps0"]}, training={"batch_size": 8, "steps": 4, "loss_is": "mean"}
)
engine = td.parallelize(
    net, torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9), plan, loss_fn=torch.nn.functional.mse_loss
)
generator = torch.Generator().manual_seed(5)
for _ in range(4):
    engine.step((torch.randn(8, 6, generator=generator), torch.randn(8, 1, generator=generator)))
td.destroy_process_group()
torch.save(net.state_dict(), sys.argv[2])
rpc.shutdown(graceful=False)
"""


def trained_here() -> dict[str, torch.Tensor]:
    """The same in one process, without a server."""
    torch.manual_seed(3)
    net = nn.Linear(6, 1)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
    generator = torch.Generator().manual_seed(5)
    for _ in range(4):
        inputs, targets = torch.randn(8, 6, generator=generator), torch.randn(8, 1, generator=generator)
        optimizer.zero_grad()
        nn.functional.mse_loss(net(inputs), targets).backward()
        optimizer.step()
    return net.state_dict()


@pytest.mark.slow
@pytest.mark.parametrize("server_token", ["a token of both", None], ids=["same token", "no token"])
def test_a_job_trains_with_a_server_outside_of_it_if_both_have_the_token(
    tmp_path: Path, server_token: str | None
) -> None:
    (tmp_path / "train.py").write_text(TRAIN)
    url, kept = f"file://{tmp_path}/store", tmp_path / "net.pt"
    plain = {name: value for name, value in os.environ.items() if name != "TORSH_JOB_TOKEN"}
    environ = plain if server_token is None else {**plain, "TORSH_JOB_TOKEN": server_token}
    serve = [sys.executable, "-m", "torsh_distributed.cli.entry_point", "ps", "serve", "--name", "ps0", "--store", url]
    with subprocess.Popen(serve, env=environ, stdout=subprocess.PIPE, text=True) as server:
        assert server.stdout is not None
        try:
            assert "serving parameters as ps0" in server.stdout.readline()
            job = subprocess.run(
                [sys.executable, "-m", "torsh_distributed.run", "train.py", url, str(kept)],
                cwd=tmp_path,
                env={**plain, "TORSH_JOB_TOKEN": "a token of both"},
                capture_output=True,
                text=True,
                timeout=100,
                check=False,
            )
        finally:
            server.send_signal(signal.SIGTERM)
            server.wait(20)
    if server_token is None:
        assert job.returncode != 0
        assert "another secret than this process" in job.stdout + job.stderr
        return
    assert job.returncode == 0, job.stdout + job.stderr
    found = torch.load(kept, weights_only=True)
    for name, value in trained_here().items():
        torch.testing.assert_close(found[name], value)


def test_a_server_that_cannot_begin_is_not_started_again(tmp_path: Path) -> None:
    (tmp_path / "keep").write_text("no directory")
    serve = [sys.executable, "-m", "torsh_distributed.cli.entry_point", "ps", "serve", "--keep", str(tmp_path / "keep")]
    done = subprocess.run(
        [*serve, "--store", f"file://{tmp_path}/store"], capture_output=True, text=True, timeout=100, check=False
    )
    assert done.returncode == 1
    assert "the server could not begin: exit status 1" in done.stderr
    assert done.stderr.count("the server failed") == 1
