"""The report as one HTML file: nothing is loaded from elsewhere, and nothing in it is a script."""

from __future__ import annotations

import html
from collections.abc import Iterable, Sequence

from torsh_distributed.green.report.run_report import RunReport

_STYLE = (
    "body{font:16px/1.5 system-ui,sans-serif;margin:2rem auto;max-width:60rem;padding:0 1rem;color-scheme:light dark}"
    "table{border-collapse:collapse;width:100%}td,th{padding:.3rem .6rem;border-bottom:1px solid #8884;text-align:left}"
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
            f"{meter['source']}{'' if meter['is_measured'] else ', estimated'}: {meter['detail'] or ''}".rstrip(": "),
        )
        for meter in report.meters
    ]
    ranks = [
        (f"rank {rank}", _shown(joules), "J", "its share of the meters") for rank, joules in report.by_rank.items()
    ]
    carbon = [(name.replace("_", " "), str(value), "", "") for name, value in (report.carbon or {}).items()]
    title = html.escape(f"Energy of {report.run_id}")
    parts = [
        f"<h1>{title}</h1><p>Energy is {html.escape(report.label)}.</p>",
        _table("Figures", ("figure", "value", "unit", "formula"), figures),
        _table("Meters", ("meter", "energy", "unit", "source"), meters),
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
