"""The energy report of a run: every figure with its formula, its label and its source."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from typing import Any

from torsh_distributed.errors import InvalidArgument
from torsh_distributed.observe.job.energy_summary import EnergySummary, EpochEnergy, MeterRow, shown_joules
from torsh_distributed.observe.job.energy_trend import EnergySpan
from torsh_distributed.observe.job.job_view import JobView

J_PER_KWH = 3.6e6
TREND_COLUMNS = ("begin", "end", "kwh", "kw", "grams", "g_per_kwh", "renewable_share", "samples_per_joule")
WORLD_G_PER_KWH = 475.0
"""codecarbon's value for the world, which the score measures a grid against."""


@dataclass(frozen=True, slots=True)
class ReportFigure:
    """One figure: None where what it is made of was not measured."""

    name: str
    value: float | None
    unit: str
    formula: str


@dataclass(frozen=True, kw_only=True)
class RunReport:
    """All of a run. `to_dict` is the JSON form; the page is made of the same."""

    run_id: str
    begin: str
    """When the first reading began; ISO 8601, UTC."""
    end: str
    label: str
    figures: tuple[ReportFigure, ...]
    meters: tuple[dict[str, Any], ...]
    by_rank: dict[int, float]
    carbon: dict[str, Any] | None
    epochs: tuple[dict[str, Any], ...]
    """epoch, kwh, co2_kg; co2_kg is None where a part has no known intensity."""
    trend: tuple[dict[str, Any], ...]
    """The course over time: TREND_COLUMNS."""
    sources: tuple[str, ...]
    notes: tuple[str, ...] = field(default_factory=tuple)

    def value(self, name: str) -> float | None:
        """The figure of that name."""
        return next(figure.value for figure in self.figures if figure.name == name)

    def to_dict(self) -> dict[str, Any]:
        """JSON-ready."""
        return {
            "run_id": self.run_id,
            "begin": self.begin,
            "end": self.end,
            "label": self.label,
            **{figure.name: figure.value for figure in self.figures},
            "units": {figure.name: figure.unit for figure in self.figures},
            "formulae": {figure.name: figure.formula for figure in self.figures},
            "meters": list(self.meters),
            "joules_by_rank": {str(rank): joules for rank, joules in self.by_rank.items()},
            "carbon": self.carbon,
            "epochs": list(self.epochs),
            "trend": list(self.trend),
            "sources": list(self.sources),
            "notes": list(self.notes),
        }


def run_report(
    view: JobView,
    *,
    pue: float = 1.0,
    offset_kg: float = 0.0,
    target_samples_per_j: float | None = None,
    market_g_per_kwh: float | None = None,
) -> RunReport:
    """The report of a job that is in `view`; raises InvalidArgument if no meter was read.

    `pue` is the power usage effectiveness of the building: it multiplies everything, once.
    `market_g_per_kwh` is the intensity of the power that was bought, by contract or certificate.
    """
    if pue < 1 or offset_kg < 0:
        raise InvalidArgument("a PUE is 1 or more, and offsets are not negative", pue=pue, offset_kg=offset_kg)
    found = view.energy.summary(total_steps=view.total_steps)
    if found is None:
        raise InvalidArgument(
            "this run has no energy in its events",
            hint="run it with `torsh run --green` and TORSH_EVENTS_DIR=DIRECTORY, and give that directory",
            run=view.header.run_id,
        )
    figures = (
        *_energy(found, pue),
        *_carbon(found, pue, offset_kg, target_samples_per_j),
        *_inventory(found, pue, market_g_per_kwh),
    )
    return RunReport(
        run_id=view.header.run_id,
        begin=_clock(found.begin),
        end=_clock(found.begin + found.duration_s),
        label=found.label,
        figures=figures,
        meters=tuple(_meter_row(meter, found) for meter in found.meters),
        by_rank={rank: joules * pue for rank, joules in found.by_rank.items()},
        carbon=found.carbon,
        epochs=tuple(_epoch_row(epoch, one, pue) for epoch, one in found.by_epoch.items()),
        trend=tuple(_span_row(span, pue) for span in view.energy.trend.spans),
        sources=_sources(found),
        notes=(*found.notes, *_sharing(found), *_warnings(found)),
    )


def _energy(found: EnergySummary, pue: float) -> list[ReportFigure]:
    made = ReportFigure
    meters = f"Σ of all intervals of all meters{f' × PUE {pue:g}' if pue != 1 else ''}"
    parts = [
        ("steps_kwh", found.steps_j, "steps that count, each with what was counted in its time"),
        ("waiting_kwh", found.waiting_j, "of the steps: share of their time that ranks waited for each other"),
        ("start_kwh", found.start_j, "before the first step"),
        ("failures_kwh", found.failures_j, "from the last step before a failure to the first after it"),
        ("undone_kwh", found.undone_j, "steps that were lost in a failure and done again"),
        ("held_kwh", found.held_j, "while the policy let the job wait"),
        ("skipped_kwh", found.skipped_j, "steps whose gradients overflowed"),
        ("other_kwh", found.other_j, "between and after steps: evaluation, checkpoints, the end"),
        ("idle_kwh", found.idle_j, "idle power × time; part of all others"),
    ]
    total_j = found.total_j * pue
    return [
        made("total_kwh", total_j / J_PER_KWH, "kWh", f"{meters} ÷ 3,600,000 J"),
        made("measured_kwh", found.measured_j * pue / J_PER_KWH, "kWh", "the part that meters counted"),
        made("estimated_kwh", found.estimated_j * pue / J_PER_KWH, "kWh", "the part without a meter"),
        *(made(name, _in_kwh(j, pue), "kWh", how) for name, j, how in parts),
        made("duration_h", found.duration_s / 3600, "h", "from the first reading to the last"),
        made("mean_kw", found.mean_w * pue / 1e3, "kW", "total ÷ duration"),
        made("peak_kw", found.peak_w * pue / 1e3, "kW", "most over one interval of the meters"),
        made("idle_kw", None if found.idle_w is None else found.idle_w * pue / 1e3, "kW", "least over one interval"),
        made("num_meters", float(len(found.meters)), "", "devices with a meter or an estimate"),
        made("num_steps", float(found.num_steps), "", "updates that are in the model"),
        made("num_samples", float(found.num_samples), "", "committed samples"),
        made("joules_per_step", _times(found.joules_per_step, pue), "J", "steps ÷ number of steps"),
        made("joules_per_sample", _times(found.joules_per_sample, pue), "J", "total ÷ committed samples"),
        made("predicted_kwh", _in_kwh(found.predicted_j, pue), "kWh", "total + joules of a step × steps left"),
        made("predicted_error_kwh", _in_kwh(found.predicted_error_j, pue), "kWh", "two standard errors of that"),
        made("samples_per_joule", _efficiency(found, pue), "1/J", "committed samples ÷ total"),
    ]


def _in_kwh(joules: float | None, pue: float) -> float | None:
    return None if joules is None else joules * pue / J_PER_KWH


def _carbon(found: EnergySummary, pue: float, offset_kg: float, target: float | None) -> list[ReportFigure]:
    made = ReportFigure
    kg = None if found.grams is None else found.grams * pue / 1e3
    graded_kwh = (found.total_j - found.ungraded_j) / J_PER_KWH
    intensity = found.grams / graded_kwh if found.grams is not None and graded_kwh > 0 else None
    predicted_kwh = _in_kwh(found.predicted_j, pue)
    predicted_kg = None if predicted_kwh is None or intensity is None else predicted_kwh * intensity / 1e3
    score, how = _score(_efficiency(found, pue), found.renewable_share, intensity, target)
    return [
        made("co2_kg", kg, "kg", "Σ kWh of an interval × g/kWh of that interval ÷ 1,000"),
        made("predicted_co2_kg", predicted_kg, "kg", "predicted_kwh × grid_g_per_kwh ÷ 1,000"),
        made("co2_g_per_sample", kg * 1e3 / found.num_samples if kg is not None and found.num_samples else None, "g",
             "co2_kg × 1,000 ÷ committed samples"),
        made("co2_g_per_step", kg * 1e3 / found.num_steps if kg is not None and found.num_steps else None, "g",
             "co2_kg × 1,000 ÷ number of steps"),
        made("grid_g_per_kwh", intensity, "g/kWh", "grams ÷ kWh of the intervals with a known intensity"),
        made("ungraded_kwh", found.ungraded_j * pue / J_PER_KWH, "kWh", "intervals without an intensity: in no gram"),
        made("renewable_share", found.renewable_share, "", "mean over the energy for which the feed told it"),
        made("offset_kg", offset_kg, "kg", "given by the user"),
        made("net_co2_kg", None if kg is None else kg - offset_kg, "kg", "co2_kg - offset_kg"),
        made("score", score, "", how),
    ]  # fmt: skip


def _inventory(found: EnergySummary, pue: float, market: float | None) -> list[ReportFigure]:
    """Scope 2 of the GHG Protocol: by the grid's average, and by what was bought. Never by a marginal intensity."""
    made, is_average = ReportFigure, found.carbon is None or found.carbon["signal"] == "average"
    kwh = found.total_j * pue / J_PER_KWH
    is_whole = found.grams is not None and found.ungraded_j <= 0 and is_average
    located = found.grams * pue / 1e3 if is_whole and found.grams is not None else None
    how = "co2_kg where all of the energy has a known average intensity; a marginal one does not count in an inventory"
    bought = None if market is None else kwh * market / 1e3
    return [
        made("scope2_location_kg", located, "kg", how),
        made("scope2_market_kg", bought, "kg", "total_kwh × intensity of the power that was bought ÷ 1,000"),
    ]


def _span_row(span: EnergySpan, pue: float) -> dict[str, Any]:
    return {
        "begin": _clock(span.begin),
        "end": _clock(span.end),
        "kwh": span.joules * pue / J_PER_KWH,
        "kw": span.mean_w * pue / 1e3,
        "grams": span.grams * pue if span.graded_j > 0 else None,
        "g_per_kwh": span.g_per_kwh,
        "renewable_share": span.renewable_share,
        "samples_per_joule": None if span.samples_per_joule is None else span.samples_per_joule / pue,
    }


def _meter_row(meter: MeterRow, found: EnergySummary) -> dict[str, Any]:
    """A device: its own counts, without the building's part."""
    is_busy = found.num_samples > 0 and meter.joules > 0
    return {**asdict(meter), "samples_per_joule": found.num_samples / meter.joules if is_busy else None}


def _epoch_row(epoch: int, one: EpochEnergy, pue: float) -> dict[str, Any]:
    is_whole = one.ungraded_j <= 0
    kg = one.grams * pue / 1e3 if is_whole else None
    return {"epoch": epoch, "kwh": one.joules * pue / J_PER_KWH, "co2_kg": kg}


def _sharing(found: EnergySummary) -> list[str]:
    """What is known of devices on which other jobs computed too."""
    told = []
    for meter in found.meters:
        if not meter.num_others:
            continue
        part = "the driver does not tell this job's part of it"
        if meter.own_share is not None:
            part = f"this job's part of the computing time then was {meter.own_share:.0%}"
        many = f"up to {meter.num_others} process{'' if meter.num_others == 1 else 'es'} of other jobs"
        told.append(
            f"node {meter.node}, {meter.meter}: {many} computed on it while "
            f"{shown_joules(meter.shared_j)} were counted, which are in the figures; {part}"
        )
    return told


def _clock(time: float) -> str:
    return datetime.fromtimestamp(time, UTC).isoformat(timespec="seconds")


def _score(
    efficiency: float | None, renewable: float | None, intensity: float | None, target: float | None
) -> tuple[float | None, str]:
    """From 0 to 1, where all three parts are known: nothing is put in for what is not."""
    how = (
        "0.4 × min(1, samples_per_joule ÷ target) + 0.3 × renewable_share + 0.3 × max(0, 1 - grid_g_per_kwh ÷ "
        f"{WORLD_G_PER_KWH:g}); none where one of them is not known"
    )
    if efficiency is None or renewable is None or intensity is None or target is None:
        return None, how
    carbon = max(0.0, 1 - intensity / WORLD_G_PER_KWH)
    return 0.4 * min(1.0, efficiency / target) + 0.3 * renewable + 0.3 * carbon, how


def _efficiency(found: EnergySummary, pue: float) -> float | None:
    return found.num_samples / (found.total_j * pue) if found.num_samples and found.total_j > 0 else None


def _times(value: float | None, factor: float) -> float | None:
    return None if value is None else value * factor


def _sources(found: EnergySummary) -> tuple[str, ...]:
    names = {
        "nvml": "NVML: the GPUs' own energy counters",
        "rapl": "RAPL: the processors' own energy counters",
        "hwmon": "hwmon: sensors of the board",
        "estimate": "an estimate from the processors' load; not measured",
    }
    used = [text for source, text in names.items() if any(meter.source == source for meter in found.meters)]
    carbon = found.carbon
    if carbon is not None:
        used.append(
            f"carbon intensity: {carbon['source']}, zone {carbon['zone']}, {carbon['signal']}, {carbon['basis']}"
        )
    return tuple(used)


def _warnings(found: EnergySummary) -> list[str]:
    told = []
    if found.carbon is not None and found.carbon["is_stale"]:
        told.append(f"the last carbon intensity was {found.carbon['age_s']:.0f} s old")
    if found.grams is not None and found.ungraded_j > 0:
        told.append(f"{found.ungraded_j / found.total_j:.1%} of the energy had no known intensity and is in no gram")
    if found.grams is None:
        told.append("no carbon intensity was known: no grams are counted")
    return told
