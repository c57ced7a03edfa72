"""Verdicts on keys of other libraries' configs."""

from __future__ import annotations

import pytest
from rich.console import Console

from torsh_distributed.errors import ConfigurationError
from torsh_distributed.migrate.report import KeyVerdict, MigrationReport, Verdict, unknown_key

REPORT = MigrationReport(
    "deepspeed",
    (
        KeyVerdict("zero_optimization.stage", 3, Verdict.HONOURED, 'fsdp.strategy = "full_shard"'),
        KeyVerdict("zero_optimization.reduce_bucket_size", 5e8, Verdict.HINT, "", "buckets are layers here"),
        KeyVerdict("sparse_attention", {"mode": "fixed"}, Verdict.REFUSED, "", "use FlexAttention"),
    ),
)


def test_the_table_has_every_key_with_its_verdict_and_the_reason() -> None:
    console = Console(width=200, record=True)
    console.print(REPORT.table())
    text = console.export_text()
    for entry in REPORT:
        (line,) = [line for line in text.splitlines() if entry.key in line]
        assert entry.verdict in line
        assert entry.reason in line
    assert "1 honoured, 1 hint, 1 refused" in text


def test_refused_keys_are_one_error_with_their_reasons() -> None:
    with pytest.raises(ConfigurationError, match=r"sparse_attention = .*mode.*: use FlexAttention"):
        REPORT.require_accepted()
    MigrationReport("deepspeed", REPORT.entries[:2]).require_accepted()


def test_an_entry_is_found_by_its_key() -> None:
    assert REPORT["zero_optimization.stage"].value == 3
    with pytest.raises(KeyError):
        REPORT["zero_optimization"]


def test_an_unknown_key_comes_with_the_nearest_name() -> None:
    problem = unknown_key("gradient_clipp1ng", ["gradient_clipping", "fp16"], kind="DeepSpeed")
    assert problem.text == "gradient_clipp1ng is not a key of a DeepSpeed config"
    assert problem.hint == "did you mean gradient_clipping?"
    assert "DeepSpeed's fp16" in unknown_key("fp16.scale_it", ["enabled"], kind="DeepSpeed").text
