"""The compiled modules: built from their sources, not loaded if stale, optional without a compiler."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from torsh_distributed.native import CODEC_KERNELS, COMPILED_MODULES, build, fingerprint, is_stale, load


@pytest.mark.ranks
def test_a_module_is_built_from_its_sources(tmp_path: Path) -> None:
    if shutil.which("cc") is None:
        pytest.skip("no C compiler")
    target = tmp_path / "_kernels.abi3.so"
    assert build(CODEC_KERNELS.sources, target) == ""
    assert target.stat().st_size > 0
    assert [path.name for path in tmp_path.iterdir()] == [target.name]


def test_every_module_has_sources_and_says_what_its_absence_costs() -> None:
    for compiled in COMPILED_MODULES:
        assert list(compiled.sources.glob("*.c"))
        assert compiled.target.parent == compiled.sources.parent
        assert compiled.without_it


def test_a_module_from_other_sources_is_stale(tmp_path: Path) -> None:
    for path in CODEC_KERNELS.sources.iterdir():
        (tmp_path / path.name).write_bytes(path.read_bytes())
    version = fingerprint(CODEC_KERNELS.sources)
    copied = CODEC_KERNELS._replace(sources=tmp_path)
    assert not is_stale(copied, version)
    (tmp_path / "kernels.h").write_text("/* other */")
    assert is_stale(copied, version)
    assert not is_stale(CODEC_KERNELS._replace(sources=tmp_path / "none, as in a wheel"), version)


def test_only_what_was_built_from_the_sources_beside_it_is_loaded(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    for compiled in COMPILED_MODULES:
        module = load(compiled)
        assert module is None or fingerprint(compiled.sources) == module.VERSION
        assert load(compiled._replace(target=compiled.target.with_name("_missing.abi3.so"))) is None
    stale = CODEC_KERNELS._replace(sources=tmp_path)  # a folder without sources is not what it was built from
    assert load(stale) is None
    if load(CODEC_KERNELS) is not None:
        assert "was built from other sources" in caplog.text


def test_without_a_compiler_it_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CC", str(tmp_path / "no-such-compiler"))
    assert build(CODEC_KERNELS.sources, tmp_path / "out.so") == "no C compiler was found"
