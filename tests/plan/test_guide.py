"""The guide's code runs as printed, and its error message is the one a user gets."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from torsh_distributed.errors import ConfigurationError
from torsh_distributed.plan import Plan

GUIDE = (Path(__file__).parents[2] / "docs/guides/plan.md").read_text()


def blocks(language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", GUIDE, re.DOTALL)


def test_the_code_runs_in_order(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert len(blocks("python")) == 4
    for number, code in enumerate(blocks("python")):
        exec(compile(code, f"block {number}", "exec"), {})


def test_the_file_loads(tmp_path: Path) -> None:
    (tmp_path / "plan.toml").write_text(blocks("toml")[0])
    assert Plan.load(tmp_path / "plan.toml").training.gradient_accumulation == 4


def test_the_printed_problems_are_the_real_ones(tmp_path: Path) -> None:
    path = tmp_path / "plan.toml"
    path.write_text('[mesh]\ndpp = 2\n[training]\nsteps = "ten"\n[precision]\ndtype = "bfloat16"\n')
    with pytest.raises(ConfigurationError) as caught:
        Plan.load(path)
    printed = blocks("console")[1].splitlines()[1:]
    assert sorted(printed) == sorted(caught.value.message.replace(str(path), "plan.toml").splitlines())
