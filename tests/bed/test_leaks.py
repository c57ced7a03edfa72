"""The leak check: what a test leaves behind is named, fails it, and is gone before the next test."""

from __future__ import annotations

import os
import threading
from pathlib import Path

import pytest

from tests.bed import leaks

pytestmark = pytest.mark.ranks

pytest_plugins = ["pytester"]


@pytest.fixture
def inner(pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch) -> pytest.Pytester:
    """A separate suite under the leak check, with short waits."""
    monkeypatch.setattr(leaks, "_GRACE_S", 0.2)
    pytester.makeconftest("from tests.bed.leaks import nothing_is_left_behind")
    return pytester


def test_a_variable_left_in_the_environment_fails_the_test_and_is_removed(inner: pytest.Pytester) -> None:
    inner.makepyfile(
        """
        import os
        def test_leaves_one(): os.environ["LEFT"] = "1"
        def test_sees_none(): assert "LEFT" not in os.environ
        """
    )
    result = inner.runpytest_inprocess()
    result.assert_outcomes(passed=2, errors=1)
    result.stdout.fnmatch_lines("*environment variable LEFT: None became '1'")


def test_a_changed_variable_is_put_back(inner: pytest.Pytester, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KEPT", "before")
    inner.makepyfile('import os\ndef test_it(): os.environ["KEPT"] = "after"')
    inner.runpytest_inprocess().stdout.fnmatch_lines("*environment variable KEPT: 'before' became 'after'")
    assert os.environ["KEPT"] == "before"


def test_a_variable_set_by_monkeypatch_is_no_leak(inner: pytest.Pytester) -> None:
    inner.makepyfile('def test_it(monkeypatch): monkeypatch.setenv("LEFT", "1")')
    inner.runpytest_inprocess().assert_outcomes(passed=1)


def test_a_running_thread_fails_the_test(inner: pytest.Pytester) -> None:
    release = threading.Event()
    threading.leak_test_release = release  # type: ignore[attr-defined] # the way into the inner suite
    inner.makepyfile(
        """
        import threading
        def test_it(): threading.Thread(target=threading.leak_test_release.wait, name="lingerer").start()
        """
    )
    try:
        result = inner.runpytest_inprocess()
    finally:
        release.set()
        del threading.leak_test_release  # type: ignore[attr-defined]
    result.assert_outcomes(passed=1, errors=1)
    result.stdout.fnmatch_lines("*thread 'lingerer'")


def test_a_thread_on_its_way_out_is_no_leak(inner: pytest.Pytester, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(leaks, "_GRACE_S", 20.0)
    inner.makepyfile("import threading\ndef test_it(): threading.Timer(0.05, lambda: None).start()")
    inner.runpytest_inprocess().assert_outcomes(passed=1)


def test_a_child_left_running_fails_the_test_and_is_ended(inner: pytest.Pytester) -> None:
    inner.makepyfile(
        """
        import os, signal, subprocess
        def test_it():
            child = subprocess.Popen(["sleep", "600"])
            with open("pid", "w") as file: file.write(str(child.pid))
            child.returncode = 0  # keeps Popen itself from complaining
        """
    )
    result = inner.runpytest_inprocess()
    result.assert_outcomes(passed=1, errors=1)
    pid = int((inner.path / "pid").read_text())
    result.stdout.fnmatch_lines(f"*process {pid}: sleep 600")
    assert not Path(f"/proc/{pid}").exists()


def test_an_orphan_is_found_though_it_is_no_child_any_more(inner: pytest.Pytester) -> None:
    inner.makepyfile(
        """
        import subprocess
        def test_it():
            subprocess.run(["sh", "-c", "sleep 601 > /dev/null & echo $! > pid"], check=True)
        """
    )
    result = inner.runpytest_inprocess()
    result.assert_outcomes(passed=1, errors=1)
    result.stdout.fnmatch_lines(f"*process {(inner.path / 'pid').read_text().strip()}: sleep 601")


def test_a_child_that_nobody_waited_for_fails_the_test(inner: pytest.Pytester) -> None:
    inner.makepyfile("import os\ndef test_it():\n    if os.fork() == 0: os._exit(0)\n")
    result = inner.runpytest_inprocess()
    result.assert_outcomes(passed=1, errors=1)
    result.stdout.fnmatch_lines("*ended, but nobody waited for it")
