"""What the options of `torsh run` mean: checked, and turned into parts of a JobSpec."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Any, get_args

import typer

from torsh_distributed.cli.error_message import print_error
from torsh_distributed.errors import ConfigurationError, FeatureNotAvailable, InvalidArgument
from torsh_distributed.launch.spec import LOOPBACK, DiscoverySpec, ElasticSpec, EntryKind, OnLoss, parse_endpoint

if TYPE_CHECKING:
    from torsh_distributed.comm.trust.job_tls import JobTls
    from torsh_distributed.plan import Plan


def elastic_spec(
    planned: dict[str, Any],
    *,
    wanted: bool,
    min_workers: int | None = None,
    max_workers: int | None = None,
    on_loss: str | None = None,
    wait_timeout_s: float | None = None,
    discovery: DiscoverySpec | None = None,
) -> ElasticSpec | None:
    """How workers may come and go, from the options and from a plan's section; options win."""
    given: dict[str, Any] = {"min_workers": min_workers, "max_workers": max_workers, "on_loss": on_loss}
    given = {name: value for name, value in given.items() if value is not None}
    if discovery is not None:
        wanted, given["discovery"] = True, discovery
    if wait_timeout_s is not None:
        given["wait_timeout_s"] = wait_timeout_s
    if not (wanted or planned):
        if given:
            names = ", ".join(f"--{name.removesuffix('_s').replace('_', '-')}" for name in given)
            raise InvalidArgument(f"{names} without --elastic has no effect", hint="add --elastic")
        return None
    if given.get("on_loss", "replace") not in get_args(OnLoss):
        raise InvalidArgument(f"--on-loss must be one of {', '.join(get_args(OnLoss))}", on_loss=on_loss)
    return ElasticSpec(**{**planned, **given})


def planned_elastic(plan: Plan | None) -> dict[str, Any]:
    """What a plan says for the launcher; empty if it does not ask for it."""
    if plan is None or not plan.elastic.enabled:
        return {}
    section = plan.elastic
    return {
        "min_workers": section.min_workers,
        "max_workers": section.max_workers,
        "on_loss": "restart" if section.mode == "restart" else section.on_loss,
        "hang_timeout_s": section.heartbeat_timeout_s,
        "wait_timeout_s": section.scaling_timeout_s,
    }


def default_heartbeat_timeout_s(*, is_elastic: bool, is_over_ssh: bool) -> float:
    """After how long a silent launcher counts as lost.

    An elastic job goes on without it, so it may be wrong now and then. Over SSH one terminal shows all nodes, and a
    dead one is to be named there within two seconds, but a wrong verdict ends the job: as late as that allows.
    """
    return 1.0 if is_elastic else 1.6 if is_over_ssh else 10.0


def entry_kind(module: bool, no_python: bool) -> EntryKind:
    """How the target is started, from the two options."""
    if module and no_python:
        raise InvalidArgument("-m and --no-python exclude each other", hint="a module is run by Python")
    return EntryKind.MODULE if module else EntryKind.COMMAND if no_python else EntryKind.SCRIPT


def master_endpoint(
    address: str | None, port: int | None, endpoint: str, *, is_standalone: bool
) -> tuple[str, int | None]:
    """Where node 0 listens, from the two spellings; giving both is an error."""
    if is_standalone and (address is not None or port is not None or endpoint):
        raise InvalidArgument(
            "--standalone chooses address and port by itself",
            hint="leave out --master-addr, --master-port and --rdzv-endpoint",
        )
    if endpoint:
        if address is not None or port is not None:
            raise InvalidArgument(
                "--rdzv-endpoint and --master-addr/--master-port say the same thing twice", hint="give one of the two"
            )
        address, port = parse_endpoint(endpoint)
    return (address or LOOPBACK).strip("[]"), port


def own_tls(certificate: Path | None, key: Path | None, authority: Path | None, *, wanted: bool) -> JobTls | None:
    """The user's own certificate, checked; None if there is none to use."""
    if certificate is None and key is None and authority is None:
        return None
    if not wanted:
        raise InvalidArgument("--tls-cert, --tls-key and --tls-ca have no effect without --tls", hint="add --tls")
    if certificate is None or key is None:
        raise InvalidArgument("--tls-cert and --tls-key belong together, and --tls-ca needs both")
    from torsh_distributed.comm.trust.job_tls import JobTls

    found = JobTls(
        certificate=certificate.resolve(),
        key=key.resolve(),
        authority=None if authority is None else authority.resolve(),
    )
    found.server_context()
    return found


def check_backend(name: str) -> None:
    """Refuse a rendezvous backend that nobody serves."""
    if name not in ("static", "c10d"):
        raise FeatureNotAvailable(
            f"the rendezvous backend {name!r} is not supported",
            hint="leave out --rdzv-backend: the launcher of node 0 brings the nodes together",
            rdzv_backend=name,
        )


def parse_ranks(text: str) -> frozenset[int] | None:
    """Numbers with commas between them; None for an empty text."""
    if not text:
        return None
    try:
        return frozenset(int(part) for part in text.split(","))
    except ValueError:
        raise InvalidArgument("--local-ranks-filter must be numbers with commas", got=text) from None


def read_token(path: Path | None) -> str | None:
    """The job's secret, from its file or from TORSH_JOB_TOKEN."""
    from torsh_distributed.comm.trust.job_secret import TOKEN_VARIABLE, read_or_create_secret_file

    return read_or_create_secret_file(path) if path is not None else os.environ.get(TOKEN_VARIABLE) or None


def read_plan(path: Path | None, *, num_ranks: int) -> Plan | None:
    """The plan of the workers, after the check of `torsh plan validate` for their number.

    Exits with status 2, as for any other wrong option, if the plan cannot run.
    """
    if path is None:
        return None
    from torsh_distributed.plan import Plan

    try:
        # As the workers read it: variables TORSH_PLAN__SECTION__KEY win over the file.
        plan = Plan.compose(path, environ=os.environ)
        plan.validate(num_ranks)
    except ConfigurationError as error:
        print_error(error)
        raise typer.Exit(2) from error
    return plan
