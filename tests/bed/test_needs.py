"""The needs-markers: unmet needs skip with their reason, met ones run, and nothing is skipped if all is required."""

from __future__ import annotations

import shutil

import pytest

from tests.bed import needs

pytest_plugins = ["pytester"]

PLUGIN = "from tests.bed.needs import *\nfrom tests.bed import needs\n"
ONE_NEED = "import pytest\n@pytest.mark.{marker}\ndef test_it(): pass\n"


@pytest.fixture
def inner(pytester: pytest.Pytester) -> pytest.Pytester:
    """A separate suite with our markers."""
    markers = "\n".join(f"    {name}: …" for name in needs.NEEDS)
    pytester.makeini(f"[pytest]\naddopts = -rs --strict-markers\nmarkers =\n{markers}\n")
    return pytester


def unmet(inner: pytest.Pytester, marker: str) -> None:
    """Give the marker a need that this machine does not satisfy."""
    inner.makeconftest(PLUGIN + f"needs.NEEDS = {{'needs_{marker}': lambda *_: 'there is no {marker} here'}}\n")


@pytest.fixture(autouse=True)
def the_real_needs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(needs, "NEEDS", needs.NEEDS)
    monkeypatch.delenv(needs.REQUIRE_ALL, raising=False)


def test_an_unmet_need_skips_with_its_reason(inner: pytest.Pytester) -> None:
    unmet(inner, "redis")
    inner.makepyfile(ONE_NEED.format(marker="needs_redis"))
    result = inner.runpytest_inprocess()
    result.assert_outcomes(skipped=1)
    result.stdout.fnmatch_lines("*needs_redis: there is no redis here")


def test_a_met_need_runs(inner: pytest.Pytester) -> None:
    inner.makeconftest(PLUGIN + "needs.NEEDS = {'needs_redis': lambda: None}")
    inner.makepyfile(ONE_NEED.format(marker="needs_redis"))
    inner.runpytest_inprocess().assert_outcomes(passed=1)


def test_where_all_is_required_an_unmet_need_fails(inner: pytest.Pytester, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(needs.REQUIRE_ALL, "1")
    unmet(inner, "redis")
    inner.makepyfile(ONE_NEED.format(marker="needs_redis"))
    result = inner.runpytest_inprocess()
    result.assert_outcomes(errors=1)
    result.stdout.fnmatch_lines("*allows no skip, but: needs_redis: there is no redis here")


def test_hardware_may_be_absent_even_so(inner: pytest.Pytester, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(needs.REQUIRE_ALL, "1")
    unmet(inner, "cuda")
    inner.makepyfile(ONE_NEED.format(marker="needs_cuda(2)"))
    inner.runpytest_inprocess().assert_outcomes(skipped=1)


@pytest.mark.parametrize(("can", "outcome"), [(True, {"errors": 1}), (False, {"skipped": 1})])
def test_deepspeed_may_be_absent_only_where_it_cannot_be_installed(
    inner: pytest.Pytester, monkeypatch: pytest.MonkeyPatch, can: bool, outcome: dict[str, int]
) -> None:
    monkeypatch.setenv(needs.REQUIRE_ALL, "1")
    monkeypatch.setattr(needs, "_may_lack_deepspeed", lambda: not can)
    unmet(inner, "deepspeed")
    inner.makepyfile(ONE_NEED.format(marker="needs_deepspeed"))
    inner.runpytest_inprocess().assert_outcomes(**outcome)


@pytest.mark.parametrize(
    ("source", "outcome"),
    [
        ("import pytest\ndef test_it(): pytest.skip('I feel like it')", {"failed": 1}),
        ("import pytest\n@pytest.mark.skip(reason='I feel like it')\ndef test_it(): pass", {"errors": 1}),
        ("import pytest\npytest.skip('I feel like it', allow_module_level=True)", {"errors": 1}),
    ],
    ids=["in the test", "by a mark", "as a module"],
)
@pytest.mark.ranks
def test_where_all_is_required_no_other_skip_passes(
    inner: pytest.Pytester, monkeypatch: pytest.MonkeyPatch, source: str, outcome: dict[str, int]
) -> None:
    inner.makeconftest(PLUGIN)
    inner.makepyfile(source)
    inner.runpytest_inprocess().assert_outcomes(skipped=1)
    monkeypatch.setenv(needs.REQUIRE_ALL, "1")
    result = inner.runpytest_inprocess()
    result.assert_outcomes(**outcome)
    result.stdout.fnmatch_lines("*allows no skip*I feel like it*")


def test_an_expected_failure_is_no_skip(inner: pytest.Pytester, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(needs.REQUIRE_ALL, "1")
    inner.makeconftest(PLUGIN)
    inner.makepyfile("import pytest\n@pytest.mark.xfail(reason='known')\ndef test_it(): assert False")
    inner.runpytest_inprocess().assert_outcomes(xfailed=1)


def test_the_lab_implies_namespaces(inner: pytest.Pytester) -> None:
    inner.makeconftest(PLUGIN + "needs.NEEDS = {'needs_netns': lambda: 'no namespaces'}\n")
    inner.makepyfile("import pytest\n@pytest.fixture\ndef lab(): return 1\ndef test_it(lab): pass")
    inner.runpytest_inprocess().assert_outcomes(skipped=1)


def test_every_marker_of_the_project_is_probed(pytestconfig: pytest.Config) -> None:
    declared = {line.split(":")[0].split("(")[0] for line in pytestconfig.getini("markers")}
    assert {name for name in declared if name.startswith("needs_")} == needs.NEEDS.keys()


def test_the_probes_name_the_program_that_is_missing(monkeypatch: pytest.MonkeyPatch, tmp_path: object) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    assert needs.redis.__wrapped__() == "no redis-server on the PATH"
    assert needs.browser.__wrapped__() == "no chromium on the PATH"
    reason = needs.netns.__wrapped__()
    assert reason in ("no ip on the PATH; install iproute2", "network namespaces need root")


def test_a_probe_really_asks_the_program(
    monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory
) -> None:
    folder = tmp_path_factory.mktemp("bin")
    broken = folder / "redis-server"
    broken.write_text("#!/bin/sh\necho 'cannot load libjemalloc' >&2\nexit 1\n")
    broken.chmod(0o755)
    monkeypatch.setenv("PATH", str(folder))
    assert shutil.which("redis-server") == str(broken)
    assert needs.redis.__wrapped__() == "`redis-server --version` says: cannot load libjemalloc"


def test_a_library_inside_a_package_that_is_missing_is_missing_too() -> None:
    assert (
        needs.library.__wrapped__("no_such_package.part") == "no no_such_package.part; pip install no_such_package.part"
    )
    assert needs.library.__wrapped__("json.no_such_part") == "no json.no_such_part; pip install json.no_such_part"
    assert needs.library.__wrapped__("json.decoder") is None


def test_a_count_of_devices_is_compared(monkeypatch: pytest.MonkeyPatch) -> None:
    import torch

    found = torch.cuda.device_count()
    assert needs.cuda.__wrapped__(found) is None
    assert needs.cuda.__wrapped__(found + 1) == f"torch sees {found} CUDA devices, {found + 1} needed"
