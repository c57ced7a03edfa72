"""What is done with the metrics of a job: pages, exports, rules, a report."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from torsh_distributed.errors import InvalidArgument

if TYPE_CHECKING:
    from torsh_distributed.plan.sections.observe import ObserveConfig

LOOPBACK_HOST = "127.0.0.1"


@dataclass(frozen=True, kw_only=True)
class ObserveSettings:
    """Everything beside the launcher that looks at the job; what is None or empty is off."""

    page_port: int | None = None
    """Port of the page for people; 0 takes a free one."""
    page_host: str = LOOPBACK_HOST
    """Address that the page listens on. Off loopback it asks for a token."""
    prometheus_port: int | None = None
    """Port of the page for Prometheus, with all ranks of this node."""
    prometheus_host: str = LOOPBACK_HOST
    """Address that it listens on."""
    report: str | None = None
    """File for the HTML report at the end of the job."""
    exports: tuple[str, ...] = ()
    """Further destinations, each `kind:target`."""
    alert_rules: str | None = None
    """TOML file with rules."""
    machine_interval_s: float = 5.0
    """Seconds between readings of the node's sensors."""

    energy: bool = False
    """Whether the job's energy is measured: what it was is said at the end."""

    can_change_plan: bool = False
    """Whether whoever started the observer takes changes of the plan that rules ask for."""

    @property
    def is_active(self) -> bool:
        """Whether anything is to be done at all."""
        return any(
            (self.page_port is not None, self.prometheus_port, self.report, self.exports, self.alert_rules, self.energy)
        )

    @classmethod
    def from_plan(cls, section: ObserveConfig) -> ObserveSettings:
        """What the section `observe` of a plan asks for."""
        return cls(
            page_port=section.dashboard_port,
            page_host=section.dashboard_host,
            prometheus_port=section.prometheus_port,
            prometheus_host=section.prometheus_host,
            report=section.report,
            exports=section.exports,
            alert_rules=section.alert_rules,
            machine_interval_s=section.collection_interval_s,
        )

    def to_dict(self) -> dict[str, Any]:
        """JSON-ready."""
        return dataclasses.asdict(self)

    @classmethod
    def from_dict(cls, record: Mapping[str, Any]) -> ObserveSettings:
        """What `to_dict` gave, in this process or another; raises InvalidArgument for anything else."""
        known = {field.name for field in dataclasses.fields(cls)}
        kept = {name: value for name, value in record.items() if name in known}
        exports = kept.get("exports", ())
        numbers = [kept.get("page_port"), kept.get("prometheus_port")]
        texts = [kept.get(name) or "" for name in ("page_host", "prometheus_host", "report", "alert_rules")]
        if (
            not isinstance(exports, list | tuple)
            or not all(isinstance(one, str) for one in [*exports, *texts])
            or not all(port is None or (isinstance(port, int) and 0 <= port < 2**16) for port in numbers)
            or not isinstance(kept.get("machine_interval_s", 1.0), int | float)
            or not all(isinstance(kept.get(name, False), bool) for name in ("can_change_plan", "energy"))
        ):
            raise InvalidArgument("these settings of observing are not understood", got=repr(dict(record))[:200])
        return cls(**{**kept, "exports": tuple(exports)})
