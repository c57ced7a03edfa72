"""The options of `--host-discovery-script`: what is refused before anything starts."""

from __future__ import annotations

import stat
from pathlib import Path

import pytest

from torsh_distributed.cli.run.discovered_job import are_here, discovery_spec, first_hosts, parse_cooldown
from torsh_distributed.errors import InvalidArgument
from torsh_distributed.launch.spec import ElasticSpec


def test_options_without_the_script_and_odd_cooldowns_are_refused() -> None:
    assert discovery_spec(None, slots_per_host=None, cooldown=None) is None
    with pytest.raises(InvalidArgument, match="--slots-per-host without --host-discovery-script"):
        discovery_spec(None, slots_per_host=2, cooldown=None)
    assert parse_cooldown("0.5-60") == (0.5, 60.0)
    for text in ("5", "60-5", "0-5", "a-b", "1-inf", "-1-5", "nan-5"):
        with pytest.raises(InvalidArgument, match="MIN-MAX"):
            parse_cooldown(text)


def test_a_job_starts_on_this_machine_with_all_slots_up_to_its_most(tmp_path: Path) -> None:
    script = tmp_path / "discover.sh"
    script.write_text("#!/bin/sh\necho localhost:3; echo 127.0.0.1; echo b:0\n")
    script.chmod(script.stat().st_mode | stat.S_IXUSR)
    spec = discovery_spec(str(script), slots_per_host=2, cooldown="1-2")
    assert spec is not None
    assert spec.cooldown_s == (1.0, 2.0)
    hosts = first_hosts(spec, ElasticSpec(min_workers=2), 4)
    assert hosts == {"localhost": 3, "127.0.0.1": 2}
    assert are_here(hosts)
    assert first_hosts(spec, ElasticSpec(max_workers=4), 2) == {"localhost": 3, "127.0.0.1": 1}
    with pytest.raises(InvalidArgument, match="at least 4 workers, and may have at most 3"):
        first_hosts(spec, ElasticSpec(max_workers=3), 4)
    assert not are_here({"a.invalid": 1, "b.invalid": 1})
    with pytest.raises(InvalidArgument, match="localhost means another machine"):
        are_here({"localhost": 1, "b.invalid": 1})
