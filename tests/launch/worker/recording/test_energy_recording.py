from __future__ import annotations

import os
import subprocess
import sys

import pytest

pytestmark = pytest.mark.slow

_SCRIPT = """
import torsh_distributed as td

green = {"enabled": True, "max_kwh": 1.0, "power_cap_w": 100.0, "carbon": "electricity_maps", "zone": "DE"}
td.init(td.Plan(green=green))
td.destroy_process_group()
"""


def test_without_our_launcher_it_is_said_what_has_no_effect_and_what_is_not_measured() -> None:
    variables = {name: value for name, value in os.environ.items() if not name.startswith("TORSH_")}
    command = [sys.executable, "-c", _SCRIPT]
    done = subprocess.run(command, env=variables, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    assert "green.max_kwh, green.power_cap_w: no effect here, only `torsh run` does that" in done.stderr
    assert "no grams are counted: Electricity Maps asks for a token" in done.stderr
