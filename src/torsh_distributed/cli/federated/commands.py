"""`torsh federated`: train on clients whose data stay where they are."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from torsh_distributed.federated.federated_config import FederatedConfig
    from torsh_distributed.federated.federated_task import FederatedTask
    from torsh_distributed.federated.rounds.round_loop import FederatedResult, RoundRecord

app = typer.Typer(help="Train on clients whose data stay where they are.", add_completion=False, no_args_is_help=True)

_TABLE_ROUNDS = 20
Task = Annotated[Path, typer.Argument(help="A Python file with a FederatedTask.")]
Rounds = Annotated[int | None, typer.Option(min=0, help="How many rounds; the task's config says it by default.")]
PerRound = Annotated[int | None, typer.Option(min=1, help="How many clients are asked in a round.")]
Epochs = Annotated[int | None, typer.Option(min=1, help="Epochs of local training in a round.")]
StrategyName = Annotated[str | None, typer.Option("--strategy", help="fedavg, fedprox, scaffold and so on.")]
SelectionName = Annotated[str | None, typer.Option("--selection", help="How clients are chosen, such as round_robin.")]
Rule = Annotated[str | None, typer.Option(help="A robust rule in place of the mean: median, multi_krum and so on.")]
Hostile = Annotated[int, typer.Option(min=0, help="How many clients of a round may be hostile, for --rule.")]
Seed = Annotated[
    int | None, typer.Option(help="Seed of the model's first values, the choice of clients and their training.")
]
Buffer = Annotated[
    int | None, typer.Option("--buffer", min=1, help="Rounds that wait for nobody: how many updates are a step.")
]
Secure = Annotated[
    bool, typer.Option("--secure-aggregation", help="The server gets the sum of the updates and no single one.")
]
Upload = Annotated[str | None, typer.Option(help="The codec of updates: int8, topk:0.01 and so on.")]
Download = Annotated[str | None, typer.Option(help="The codec of the model: fp16, bf16, int8 or nbit.")]
Feedback = Annotated[
    bool | None, typer.Option("--error-feedback", help="Clients add what a codec left out to their next update.")
]
Output = Annotated[
    Path | None, typer.Option(help="Keep the state after each round here, and the model; a later run goes on.")
]


@app.callback()
def _group() -> None:
    """Train on clients whose data stay where they are."""


@app.command("simulate")
def simulate_command(
    task: Task,
    clients: Annotated[int, typer.Option(min=1, help="How many virtual clients.")] = 10,
    workers: Annotated[int, typer.Option(min=1, help="How many processes train them.")] = 1,
    rounds: Rounds = None,
    rule: Rule = None,
    hostile: Hostile = 0,
    per_round: PerRound = None,
    epochs: Epochs = None,
    strategy: StrategyName = None,
    selection: SelectionName = None,
    buffer: Buffer = None,
    secure_aggregation: Secure = False,
    upload: Upload = None,
    download: Download = None,
    error_feedback: Feedback = None,
    seed: Seed = None,
    dropout: Annotated[float, typer.Option(min=0, max=1, help="Probability that a client does not answer.")] = 0.0,
    stragglers: Annotated[
        float, typer.Option(min=0, max=1, help="Probability that a client does only some of its epochs.")
    ] = 0.0,
    output: Output = None,
) -> None:
    """Train with virtual clients on this machine."""
    from torsh_distributed.federated.async_buffer import AsyncBuffer
    from torsh_distributed.federated.federated_task import load_task
    from torsh_distributed.federated.simulation.simulate import simulate
    from torsh_distributed.federated.simulation.virtual_clients import Availability

    loaded = load_task(task)
    config = _config(
        loaded,
        rounds=rounds,
        clients_per_round=per_round,
        local_epochs=epochs,
        strategy=strategy,
        selection=selection,
        rule=rule,
        hostile=hostile,
        buffer=None if buffer is None else AsyncBuffer(size=buffer),
        secure_aggregation=secure_aggregation,
        upload=upload,
        download=download,
        error_feedback=error_feedback,
        seed=seed,
    )
    with _events_written():
        result = simulate(
            task if workers > 1 else loaded,
            num_clients=clients,
            config=config,
            num_workers=workers,
            availability=Availability(dropout=dropout, stragglers=stragglers),
            directory=output,
            on_round=_print_round,
        )
    _finish(result, output)


@app.command("serve")
def serve_command(
    task: Task,
    directory: Annotated[Path, typer.Option(help="Keys, devices and rounds are kept here; a later run goes on.")],
    host: Annotated[
        str, typer.Option(help="Address to listen on. Any but loopback lets others connect.")
    ] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="Port to listen on; 0 takes a free one.")] = 0,
    tokens: Annotated[int, typer.Option(min=0, help="How many new enrolment tokens to print.")] = 0,
    announce: Annotated[
        bool, typer.Option("--announce", help="Let devices on the local network find this server by mDNS.")
    ] = False,
    revoke: Annotated[list[str] | None, typer.Option(help="A device that may not take part any more.")] = None,
    deadline_s: Annotated[float, typer.Option(min=1, help="The longest that a round waits for devices.")] = 600.0,
    heartbeat_s: Annotated[float, typer.Option(help="Seconds between two signs of life of a device.")] = 10.0,
    expire_s: Annotated[float, typer.Option(help="A device that was silent for so long is given up.")] = 60.0,
    adapt_links: Annotated[
        bool,
        typer.Option(
            "--adapt-links", help="Slow links get a codec, rounds a measured deadline, metered links no work."
        ),
    ] = False,
    upstream: Annotated[
        str | None, typer.Option(help="HOST:PORT of a server of the tier above, of which this one is a device.")
    ] = None,
    name: Annotated[str | None, typer.Option(help="This server's name as a device; with --upstream.")] = None,
    upstream_token: Annotated[str | None, typer.Option(help="Token to enrol there, the first time.")] = None,
    period: Annotated[int, typer.Option(min=1, help="Rounds with its devices for each round of the tier above.")] = 1,
    rounds: Rounds = None,
    per_round: PerRound = None,
    min_clients: Annotated[int | None, typer.Option(min=1, help="The fewest updates that make a round.")] = None,
    epochs: Epochs = None,
    strategy: StrategyName = None,
    selection: SelectionName = None,
    rule: Rule = None,
    hostile: Hostile = 0,
    buffer: Buffer = None,
    secure_aggregation: Secure = False,
    upload: Upload = None,
    download: Download = None,
    error_feedback: Feedback = None,
    seed: Seed = None,
) -> None:
    """Train with devices, which join over TLS."""
    from torsh_distributed.errors import InvalidArgument
    from torsh_distributed.federated.async_buffer import AsyncBuffer
    from torsh_distributed.federated.deployment.device_heartbeat import HeartbeatSettings
    from torsh_distributed.federated.deployment.device_links import LinkAdaptation
    from torsh_distributed.federated.deployment.serve import serve_devices
    from torsh_distributed.federated.deployment.tier_server import serve_tier
    from torsh_distributed.federated.federated_task import load_task

    if (upstream is None) != (name is None) or (upstream is None and (upstream_token or period > 1)):
        raise InvalidArgument("--upstream and --name go together, and --upstream-token and --period with them")
    if upstream is not None and (rounds is not None or epochs is not None or revoke or announce):
        raise InvalidArgument("with --upstream --rounds, --epochs, --revoke and --announce are for the tier above")
    loaded = load_task(task)
    config = _config(
        loaded,
        rounds=rounds,
        clients_per_round=per_round,
        min_clients=min_clients,
        local_epochs=epochs,
        strategy=strategy,
        selection=selection,
        rule=rule,
        hostile=hostile,
        buffer=None if buffer is None else AsyncBuffer(size=buffer),
        secure_aggregation=secure_aggregation,
        upload=upload,
        download=download,
        error_feedback=error_feedback,
        seed=seed,
    )
    shared: dict[str, Any] = {
        "config": config,
        "directory": directory,
        "host": host,
        "port": port,
        "num_tokens": tokens,
        "deadline_s": deadline_s,
        "heartbeat": HeartbeatSettings(beat_s=heartbeat_s, expire_s=expire_s),
        "links": LinkAdaptation() if adapt_links else None,
        "say": typer.echo,
        "on_round": _print_round,
    }
    if upstream is not None and name is not None:
        with _events_written():
            sent = serve_tier(loaded, _address(upstream), name=name, period=period, token=upstream_token, **shared)
        typer.echo(f"the run is over; this server sent {sent} updates")
        return
    with _events_written():
        result = serve_devices(loaded, announces=announce, revoked=revoke or [], **shared)
    _finish(result, directory)


@app.command("join")
def join_command(
    server: Annotated[str, typer.Argument(help="HOST:PORT of the server; left out with --discover.")],
    name: Annotated[str, typer.Option(help="This device's name; it stays the same.")],
    directory: Annotated[Path, typer.Option(help="The device's key is kept here.")],
    task: Annotated[Path | None, typer.Argument(help="A Python file with a FederatedTask.")] = None,
    discover: Annotated[
        bool, typer.Option("--discover", help="Find the server on the local network, where it runs with --announce.")
    ] = False,
    token: Annotated[str | None, typer.Option(help="Token to enrol with, the first time.")] = None,
    give_up_s: Annotated[float, typer.Option(min=0, help="How long the server may be away.")] = 60.0,
    metered: Annotated[
        bool | None,
        typer.Option(
            "--metered/--no-metered", help="This device's link is metered. Default: what NetworkManager says."
        ),
    ] = None,
    secure_aggregation: Annotated[
        bool, typer.Option("--secure-aggregation", help="Send masked updates only; the server needs the same option.")
    ] = False,
    peers: Annotated[
        Path | None, typer.Option(help="The devices to share secrets with, a line of `torsh federated key` for each.")
    ] = None,
) -> None:
    """Take part as a device, with the data that it has."""
    from torsh_distributed.errors import InvalidArgument
    from torsh_distributed.federated.deployment.device_client import DeviceClient
    from torsh_distributed.federated.deployment.device_links import network_is_metered
    from torsh_distributed.federated.deployment.identity.known_peers import read_peers
    from torsh_distributed.federated.federated_config import config_of
    from torsh_distributed.federated.federated_task import load_task
    from torsh_distributed.federated.privacy.secure_sum.secure_aggregation import SecureAggregation

    if discover == (task is not None):
        raise InvalidArgument("give HOST:PORT and a task, or --discover and a task", server=server)
    address = None if task is None else _address(server)
    loaded = load_task(server if task is None else task)
    secure = config_of(loaded).secure_aggregation
    if secure_aggregation and secure is None:
        secure = SecureAggregation()
    client = DeviceClient(
        loaded,
        address,
        name=name,
        directory=directory,
        token=token,
        give_up_s=give_up_s,
        secure_aggregation=secure,
        peers=None if peers is None else read_peers(peers),
        is_metered=network_is_metered if metered is None else lambda: bool(metered),
    )
    typer.echo(f"the run is over; this device sent {client.run()} updates")


def _address(text: str) -> tuple[str, int]:
    from torsh_distributed.errors import InvalidArgument

    host, _, port = text.rpartition(":")
    if not host or not port.isdigit():
        raise InvalidArgument("the server is given as HOST:PORT", server=text)
    return host, int(port)


@app.command("key")
def key_command(
    name: Annotated[str, typer.Option(help="This device's name.")],
    directory: Annotated[Path, typer.Option(help="The device's key is kept here, and made if there is none.")],
) -> None:
    """Print this device's line for the list of peers of others."""
    from torsh_distributed.federated.deployment.identity.device_identity import DeviceKey
    from torsh_distributed.federated.deployment.identity.known_peers import peer_line

    directory.mkdir(parents=True, exist_ok=True, mode=0o700)
    typer.echo(peer_line(name, DeviceKey.load_or_make(directory / "device.key").public))


def _config(task: FederatedTask, **given: Any) -> FederatedConfig:
    """The task's config with what the command line says."""
    from torsh_distributed.errors import InvalidArgument
    from torsh_distributed.federated.client_selection import selection_named
    from torsh_distributed.federated.federated_config import config_of
    from torsh_distributed.federated.privacy.secure_sum.secure_aggregation import SecureAggregation
    from torsh_distributed.federated.robust.registry import rule_named
    from torsh_distributed.federated.strategies.registry import strategy_named

    for name, find in (("strategy", strategy_named), ("selection", selection_named)):
        if given[name] is not None:
            given[name] = find(given[name])
    config = config_of(task)
    given.setdefault("min_clients", None)
    hostile = given.pop("hostile")
    if given["rule"] is not None:
        given["rule"] = rule_named(given["rule"], hostile)
        if given["min_clients"] is None:
            given["min_clients"] = max(config.min_clients, given["rule"].fewest)
    elif hostile:
        raise InvalidArgument("--hostile is for --rule, and has no effect without it", hostile=hostile)
    if given.pop("secure_aggregation"):
        secure = config.secure_aggregation or SecureAggregation()
        fewest = max(given["min_clients"] or config.min_clients, secure.fewest)
        given |= {"secure_aggregation": secure, "min_clients": fewest}
    return dataclasses.replace(config, **{name: value for name, value in given.items() if value is not None})


@contextlib.contextmanager
def _events_written() -> Iterator[None]:
    """Rounds as events in TORSH_EVENTS_DIR, for `torsh dashboard` and its report; nothing without it."""
    import os

    directory = os.environ.get("TORSH_EVENTS_DIR")
    if not directory:
        yield
        return
    from torsh_distributed.events import JsonlSink

    with JsonlSink(directory):
        yield


def _print_round(record: RoundRecord) -> None:
    figures = "  ".join(f"{name} {value:.4f}" for name, value in record.figures.items())
    if record.epsilon is not None:
        figures += f"  ε {record.epsilon:.3f}"
    lost = "".join(f"; {count} × {reason}" for reason, count in record.failures.items())
    typer.echo(f"round {record.round}: {record.num_updates} of {record.num_chosen} clients  {figures}{lost}")


def _print_table(rounds: list[RoundRecord]) -> None:
    """The last rounds; of a longer run the first one, too."""
    from rich.console import Console
    from rich.table import Table

    shown = rounds if len(rounds) <= _TABLE_ROUNDS else [rounds[0], *rounds[1 - _TABLE_ROUNDS :]]
    names = [name for name in shown[-1].figures if not name.startswith("client_")]
    table = Table("round", "clients", "up KB", "down KB", "seconds", *names, "ε", box=None)
    for record in shown:
        figures = [f"{record.figures[name]:.4f}" if name in record.figures else "" for name in names]
        table.add_row(
            str(record.round),
            f"{record.num_updates}/{record.num_chosen}",
            f"{record.bytes_up / 1024:.1f}",
            f"{record.bytes_down / 1024:.1f}",
            f"{record.duration_s:.2f}",
            *figures,
            "" if record.epsilon is None else f"{record.epsilon:.3f}",
        )
    Console().print(table)


def _finish(result: FederatedResult, output: Path | None) -> None:
    if result.rounds:
        _print_table(result.rounds)
    seconds = sum(record.duration_s for record in result.rounds)
    typer.echo(f"{len(result.rounds)} rounds in {seconds:.1f} s")
    if result.stopped is not None:
        typer.echo(f"ended early: {result.stopped}")
    if output is not None:
        import torch

        torch.save(result.model.state_dict(), output / "model.pt")
        typer.echo(f"the model is in {output / 'model.pt'}")
