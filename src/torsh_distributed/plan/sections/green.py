"""What a run costs in energy: the `green` section of a plan."""

from __future__ import annotations

from pydantic import Field

from torsh_distributed.plan.section import Section


class GreenConfig(Section):
    """Energy of a run, measured where the machine has meters and else estimated and labelled so."""

    enabled: bool = False
    """Read the node's meters while the job runs. `torsh run --green` does the same for one run."""

    interval_s: float = Field(default=1.0, ge=0.5, le=60)
    """Seconds between two readings of the meters. A GPU's counter moves ten times a second: shorter intervals would
    give steps too much or too little."""

    node_full_w: float | None = Field(default=None, gt=0)
    """Power of a node's processors at full load, for the estimate where they have no meter that can be read. Left out:
    the thermal design power of a table, or an assumption for each core."""
