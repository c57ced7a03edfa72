"""init(): other packages' backends, fallbacks, other places to meet and devices, as torch has them."""

from __future__ import annotations

import gc
import os
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as TorchDDP

import torsh_distributed as td
from tests.bed.ports import free_port
from tests.bed.world import World
from torsh_distributed.comm.meeting import rendezvous
from torsh_distributed.errors import ConfigurationError, FeatureNotAvailable, InvalidArgument
from torsh_distributed.launch.worker.environment import Environment
from torsh_distributed.launch.worker.init_method import place_for

MODULE = "tests.bed.third_party_backend"


def weights_after(backend: str, module: str) -> tuple[str, list[float], int]:
    td.init(td.Plan.from_dict({"distributed": {"backend": backend, "backend_module": module}}), timeout_s=20)
    torch.manual_seed(td.rank())
    model = td.DistributedDataParallel(nn.Linear(3, 2))
    model(torch.full((4, 3), float(td.rank() + 1))).square().sum().backward()
    found = [value for param in model.parameters() if param.grad is not None for value in param.grad.flatten().tolist()]
    name = td.comm.backend()
    td.destroy_process_group()
    if not module:
        return name, found, 0
    from tests.bed import third_party_backend

    return name, found, len(third_party_backend.calls)


@pytest.mark.ranks
def test_a_backend_of_another_package_trains_as_gloo_does(world: World) -> None:
    theirs = world.run(weights_after, "counted", MODULE, backend=None)
    plain = world.run(weights_after, "gloo", "", backend=None)
    assert [name for name, _, _ in theirs] == ["counted", "counted"]
    assert all(count > 0 for _, _, count in theirs)
    assert [grads for _, grads, _ in theirs] == [grads for _, grads, _ in plain]


def test_a_name_that_nothing_registers_is_refused() -> None:
    with pytest.raises(ConfigurationError, match="or a name that backend_module registers"):
        td.Plan.from_dict({"distributed": {"backend": "counted"}})
    with pytest.raises(ConfigurationError, match=r"distributed\.fallback must be"):
        td.Plan.from_dict({"distributed": {"fallback": ["gloo", "glo"]}})


def absent_module() -> None:
    td.init(td.Plan.from_dict({"distributed": {"backend": "oneccl", "backend_module": "not_there.at_all"}}))


def registers_another_name() -> None:
    td.init(td.Plan.from_dict({"distributed": {"backend": "countd", "backend_module": MODULE}}))


@pytest.mark.ranks
def test_a_module_that_is_absent_or_registers_another_name_is_named(world: World) -> None:
    with pytest.raises(FeatureNotAvailable, match=r"'not_there\.at_all' cannot be imported"):
        world.run(absent_module, num_ranks=1, backend=None)
    with pytest.raises(InvalidArgument, match=r"did you mean .*counted"):
        world.run(registers_another_name, num_ranks=1, backend=None)


def fall_back(chain: list[str]) -> tuple[str, float, list[Any]]:
    decisions: list[Any] = []
    td.events.subscribe(lambda event: decisions.append(event) if event.kind == "decision" else None)
    first, *others = chain
    # Rank 1 alone has the package of the first backend.
    if os.environ["RANK"] == "1":
        __import__(MODULE)
    td.init_process_group(first, fallback=others, timeout=20)
    value = torch.tensor(float(td.rank() + 1))
    dist.all_reduce(value)
    name = td.comm.backend()
    td.destroy_process_group()
    return name, value.item(), [(one.choice, one.reason) for one in decisions if one.subject == "backend fallback"]


@pytest.mark.ranks
def test_all_ranks_fall_back_together_if_one_cannot_use_the_backend(world: World) -> None:
    found = world.run(fall_back, ["counted", "ucc", "gloo"], backend=None)
    assert [(name, value) for name, value, _ in found] == [("gloo", 3.0), ("gloo", 3.0)]
    for _, _, [(choice, reason)] in found:
        assert choice == "gloo"
        assert "unknown backend" in reason
        assert "(rank 0)" in reason
        assert "without UCC" in reason


@pytest.mark.ranks
def test_without_a_usable_backend_every_rank_raises(world: World) -> None:
    with pytest.raises(FeatureNotAvailable, match=r"no backend of .* can be used on every rank"):
        world.run(fall_back, ["counted", "ucc"], backend=None)


def refused_late(folder: str) -> str:
    """Rank 1 reads the roster when rank 0, which hosts the store, has left, if that leaves so early."""
    left, rank = Path(folder) / "left", os.environ["RANK"]
    if rank == "1":
        given, until_s = rendezvous._await_verdict, time.monotonic() + 0.5

        def late(*args: Any) -> dict[str, Any]:
            while not left.exists() and time.monotonic() < until_s:
                time.sleep(0.01)
            return given(*args)

        rendezvous._await_verdict = late
    said = ""
    try:
        fall_back(["counted", "ucc"])
    except FeatureNotAvailable as error:
        said = error.message
    gc.collect()
    if rank == "0":
        left.touch()
    return said


@pytest.mark.ranks
def test_a_rank_that_reads_late_what_all_refuse_is_told_it_too(world: World, tmp_path: Path) -> None:
    for said in world.run(refused_late, str(tmp_path), backend=None):
        assert "can be used on every rank" in said


def meet_at(init_method: str, backend: str, variables: dict[str, str]) -> tuple[float, str]:
    rank = os.environ["RANK"]
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        os.environ.pop(name, None)
    os.environ.update({name: text.format(rank=rank) for name, text in variables.items()})
    place = td.init(
        backend=backend, init_method=init_method.format(rank=rank), timeout_s=20, device_id=torch.device("cpu")
    )
    value = torch.tensor(float(td.rank() + 1))
    dist.all_reduce(value)
    assert td.device() == torch.device("cpu")
    td.destroy_process_group()
    return value.item(), place.source


@pytest.mark.ranks
@pytest.mark.parametrize("backend", ["gloo", "torsh"])
def test_ranks_meet_at_an_address_or_in_a_file(world: World, tmp_path: Path, backend: str) -> None:
    at = f"tcp://127.0.0.1:{free_port()}?rank={{rank}}&world_size=3"
    found = world.run(meet_at, at, backend, {}, num_ranks=3, backend=None)
    assert [value for value, _ in found] == [6.0, 6.0, 6.0]
    assert found[2][1].startswith("init_method tcp://")
    file = tmp_path / "meeting"
    variables = {"RANK": "{rank}", "WORLD_SIZE": "3"}
    for _ in range(2):  # the last rank to leave removes the file, so it serves the next start
        found = world.run(meet_at, f"file://{file}", backend, variables, num_ranks=3, backend=None)
        assert [value for value, _ in found] == [6.0, 6.0, 6.0]
        file.unlink(missing_ok=True)  # ranks of this bed leave without running destructors


@pytest.mark.ranks
def test_a_file_in_which_another_world_met_is_refused(world: World, tmp_path: Path) -> None:
    left = dist.FileStore(str(tmp_path / "left"), 1)
    left.set("torsh/0/all-up", "")
    with pytest.raises(ConfigurationError, match="another world has met"):
        world.run(
            meet_at, f"file://{tmp_path}/left", "gloo", {"RANK": "0", "WORLD_SIZE": "1"}, num_ranks=1, backend=None
        )


@pytest.mark.parametrize(
    "init_method", ["udp://a:1", "tcp://:1", "tcp://a", "tcp://a:1?rank=x", "file://b/c", "file:///", "env://x", ""]
)
def test_an_init_method_that_means_nothing_is_refused(init_method: str) -> None:
    with pytest.raises(InvalidArgument):
        place_for(init_method, Environment(source="test"))


def test_the_launchers_store_is_used_at_its_own_address_only() -> None:
    place = Environment(source="test", master_addr="a", master_port=29500, has_agent_store=True)
    assert place_for("tcp://a:29500", place)[0].has_agent_store
    assert not place_for("tcp://a:29501", place)[0].has_agent_store


def test_a_gpu_that_is_not_there_is_refused() -> None:
    with pytest.raises(InvalidArgument, match="device_id is a GPU that this process sees"):
        td.init(device_id=torch.cuda.device_count())


def wrap_with_devices() -> list[str]:
    td.init(timeout_s=20)
    refused = []
    for wrapper in (TorchDDP, td.DistributedDataParallel):
        for given in ({"device_ids": [0]}, {"output_device": 1}):
            try:
                wrapper(nn.Linear(2, 2), **given)
            except ValueError as error:
                refused.append(str(error))
        wrapper(nn.Linear(2, 2), device_ids=None, output_device=None)
    td.destroy_process_group()
    return refused


@pytest.mark.ranks
def test_device_ids_mean_what_they_mean_in_torch(world: World) -> None:
    [refused] = world.run(wrap_with_devices, num_ranks=1, backend=None)
    assert len(refused) == 4
    assert refused[:2] == refused[2:]
