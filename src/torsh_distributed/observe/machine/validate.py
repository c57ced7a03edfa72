"""`validate_environment`: every check of this machine, before a run."""

from __future__ import annotations

import os
from collections.abc import Mapping

from torsh_distributed.observe.machine.devices import check_devices
from torsh_distributed.observe.machine.diagnostic_result import DiagnosticResult
from torsh_distributed.observe.machine.machine_limits import check_limits
from torsh_distributed.observe.machine.network_checks import check_network
from torsh_distributed.observe.machine.software import check_software
from torsh_distributed.observe.machine.variables import check_variables


def validate_environment(environ: Mapping[str, str] | None = None) -> list[DiagnosticResult]:
    """What is found on this machine, good and bad, in the order to read it in. Starts nothing and changes nothing."""
    chosen = os.environ if environ is None else environ
    return [
        *check_software(chosen),
        *check_variables(chosen),
        *check_network(chosen),
        *check_limits(),
        *check_devices(chosen),
    ]
