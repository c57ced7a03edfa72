"""The report as one HTML file: nothing is loaded from elsewhere, and nothing in it is a script."""

from __future__ import annotations

import html
from collections.abc import Iterable, Mapping, Sequence
from datetime import datetime
from typing import Any

from torsh_distributed.green.report.run_report import RunReport

_STYLE = (
    "body{font:16px/1.5 system-ui,sans-serif;margin:2rem auto;max-width:60rem;padding:0 1rem;color-scheme:light dark}"
    "table{border-collapse:collapse;width:100%}td,th{padding:.3rem .6rem;border-bottom:1px solid #8884;text-align:left}"
    "svg{width:100%;height:auto}svg text{font-size:11px;fill:currentColor}"
    "th[scope=row]{white-space:nowrap}"
    "td.number{text-align:right;font-variant-numeric:tabular-nums}.dim{opacity:.7}"
)


def report_page(report: RunReport) -> str:
    """The whole page."""
    figures = [
        (figure.name.replace("_", " "), _shown(figure.value), figure.unit, figure.formula) for figure in report.figures
    ]
    meters = [
        (
            f"node {meter['node']}, {meter['meter']}",
            _shown(meter["joules"]),
            "J",
            f"mean {meter['mean_w']:.4g} W, most {meter['peak_w']:.4g} W; {meter['source']}"
            f"{'' if meter['is_measured'] else ', estimated'}{_device(meter)}: {meter['detail'] or ''}".rstrip(": "),
        )
        for meter in report.meters
    ]
    ranks = [
        (f"rank {rank}", _shown(joules), "J", "its share of the meters") for rank, joules in report.by_rank.items()
    ]
    epochs = [
        (f"epoch {row['epoch']}", _shown(row["kwh"]), "kWh", f"CO2: {_shown(row['co2_kg'])}{_kg(row['co2_kg'])}")
        for row in report.epochs
    ]
    kept = ("g_per_kwh", "source", "zone", "signal", "basis", "is_stale", "renewable_share")
    carbon = [
        (name.replace("_", " "), str(value), "", "") for name, value in (report.carbon or {}).items() if name in kept
    ]
    title = html.escape(f"Energy of {report.run_id}")
    parts = [
        f"<h1>{title}</h1><p>From {report.begin} to {report.end}. Energy is {html.escape(report.label)}.</p>",
        _course(report.trend),
        _table("Figures", ("figure", "value", "unit", "formula"), figures),
        _table("Meters", ("meter", "energy", "unit", "source"), meters),
        _table("Epochs", ("epoch", "energy", "unit", ""), epochs) if epochs else "",
        _table("Ranks", ("rank", "energy", "unit", ""), ranks),
        _table("Carbon intensity that counted last", ("", "", "", ""), carbon) if carbon else "",
        _list("Sources", report.sources),
        _list("Notes", report.notes),
    ]
    policy = "default-src 'none'; style-src 'unsafe-inline'; base-uri 'none'; form-action 'none'"
    return (
        f'<!doctype html><html lang="en"><head><meta charset="utf-8"><title>{title}</title>'
        f'<meta http-equiv="Content-Security-Policy" content="{policy}">'
        f"<style>{_STYLE}</style></head><body>{''.join(parts)}</body></html>\n"
    )


def _device(meter: Mapping[str, Any]) -> str:
    """What a device told beside its energy."""
    told = []
    if meter["utilization"] is not None:
        told.append(f"computed {meter['utilization']:.0%} of the time")
    if meter["peak_celsius"] is not None:
        told.append(f"at most {meter['peak_celsius']:.0f} °C")
    if meter["samples_per_joule"] is not None:
        told.append(f"{meter['samples_per_joule']:.4g} samples per joule")
    return "".join(f"; {one}" for one in told)


def _kg(value: float | None) -> str:
    return "" if value is None else " kg"


def _course(trend: Sequence[Mapping[str, Any]]) -> str:
    """Power as bars, and the grid's intensity as a line above them, over time."""
    if len(trend) < 2:
        return ""
    begin, end = (datetime.fromisoformat(trend[at][key]).timestamp() for at, key in ((0, "begin"), (-1, "end")))
    most_kw = max(float(row["kw"]) for row in trend) or 1.0
    most_g = max((float(row["g_per_kwh"] or 0.0) for row in trend), default=0.0)

    def x(text: str) -> float:
        return 60 + 840 * (datetime.fromisoformat(text).timestamp() - begin) / max(1e-9, end - begin)

    bars, points = [], []
    for row in trend:
        left, right, high = x(row["begin"]), x(row["end"]), 170 * float(row["kw"]) / most_kw
        bars.append(
            f'<rect x="{left:.1f}" y="{190 - high:.1f}" width="{max(1.0, right - left):.1f}" height="{high:.1f}"/>'
        )
        if row["g_per_kwh"] is not None and most_g > 0:
            points.append(f"{(left + right) / 2:.1f},{190 - 170 * float(row['g_per_kwh']) / most_g:.1f}")
    line = f'<polyline points="{" ".join(points)}" fill="none" stroke="#c60" stroke-width="2"/>' if points else ""
    grams = f'<text x="904" y="24">{most_g:.0f} g/kWh</text>' if points else ""
    told = f"power, at most {most_kw * 1e3:.4g} W" + (
        f"; intensity of the grid, at most {most_g:.0f} g/kWh" if points else ""
    )
    return (
        f'<h2>Over time</h2><svg viewBox="0 0 980 212" role="img" aria-label="{told}">'
        f'<g fill="#48c8">{"".join(bars)}</g>{line}<text x="0" y="24">{most_kw * 1e3:.4g} W</text>{grams}'
        f'<text x="60" y="206">{trend[0]["begin"]}</text>'
        f'<text x="900" y="206" text-anchor="end">{trend[-1]["end"]}</text></svg><p class="dim">Bars: {told}.</p>'
    )


def _table(title: str, heads: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    head = "".join(f'<th scope="col">{html.escape(text)}</th>' for text in heads)
    body = "".join(
        f'<tr><th scope="row">{html.escape(row[0])}</th><td class="number">{html.escape(row[1])}</td>'
        f'<td>{html.escape(row[2])}</td><td class="dim">{html.escape(row[3])}</td></tr>'
        for row in rows
    )
    return f"<h2>{html.escape(title)}</h2><table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>"


def _list(title: str, lines: Sequence[str]) -> str:
    shown = "".join(f"<li>{html.escape(line)}</li>" for line in lines)
    return f"<h2>{html.escape(title)}</h2><ul>{shown}</ul>" if lines else ""


def _shown(value: float | None) -> str:
    return "not known" if value is None else f"{value:,.6g}"
