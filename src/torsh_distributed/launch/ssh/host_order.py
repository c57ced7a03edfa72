"""What a host is told over ssh's stdin: one line with everything it needs, then one line for each signal or offer.

Why stdin: arguments and variables of a process can be read on the host by others or end up in logs; this line has the
job's secret and the user's variables.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, Any

from torsh_distributed.comm.trust.job_secret import without_secrets
from torsh_distributed.launch.spec import JobSpec

if TYPE_CHECKING:
    from pydantic import TypeAdapter

_PREFIXES = (
    "TORSH_",
    "TORCH",
    "PYTORCH",
    "PYTHON",
    "CUDA_",
    "NCCL_",
    "GLOO_",
    "OMP_",
    "MKL_",
    "OPENBLAS_",
    "HF_",
    "WANDB_",
    "MLFLOW_",
    "TOKENIZERS_",
)
"""Variables that training reads: these are carried to the hosts."""

_LOCAL = ("TORSH_STATE_DIR", "PYTHONHOME", "PYTHONEXECUTABLE", "TORSH_LINE_FD", "TORSH_STORE", "TORSH_PROGRESS_FILE")
"""Of these, those that mean something on this machine only."""


@dataclass(frozen=True, kw_only=True)
class HostOrder:
    """The first line: where to start, with which variables, and what."""

    directory: str
    env: dict[str, str]
    spec: JobSpec

    def to_line(self) -> bytes:
        """The order as one line."""
        return _adapter().dump_json(self) + b"\n"

    @staticmethod
    def from_line(line: bytes) -> HostOrder:
        """The order in the line; raises pydantic's ValidationError if it is not one."""
        order: HostOrder = _adapter().validate_json(line)
        return order


@cache
def _adapter() -> TypeAdapter[Any]:
    from pydantic import TypeAdapter

    from torsh_distributed.plan.sections.green import GreenConfig

    adapter = TypeAdapter(HostOrder)
    # A spec names this type for type checkers alone: launchers start without pydantic.
    adapter.rebuild(_types_namespace={"GreenConfig": GreenConfig})
    return adapter


def carried_variables(environ: Mapping[str, str], names: Iterable[str] = ()) -> dict[str, str]:
    """What of this environment goes to the hosts: what training reads, and `names`. Never the job's secret."""
    wanted = set(names)
    return {
        name: value
        for name, value in without_secrets(environ).items()
        if name in wanted or (name.startswith(_PREFIXES) and name not in _LOCAL)
    }


def signal_line(number: int) -> bytes:
    """Pass a signal on to the launcher."""
    return json.dumps({"signal": int(number)}).encode() + b"\n"


def offer_line(slots: Mapping[int, int]) -> bytes:
    """Tell the launcher that leads how many workers each node takes."""
    return json.dumps({"offer": slots}).encode() + b"\n"


def read_offer(line: bytes) -> dict[str, int] | None:
    """The offer of such a line; None for any other line."""
    try:
        found = json.loads(line)
    except ValueError:
        return None
    offer = found.get("offer") if isinstance(found, dict) else None
    return offer if isinstance(offer, dict) else None


def read_signal(line: bytes) -> int | None:
    """The signal of such a line; None for any other line."""
    try:
        found = json.loads(line)
    except ValueError:
        return None
    number = found.get("signal") if isinstance(found, dict) else None
    return number if isinstance(number, int) else None
