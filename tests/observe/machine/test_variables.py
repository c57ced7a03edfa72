"""Variables of a job that do not fit together."""

from __future__ import annotations

import pytest

from torsh_distributed.known_variables import KNOWN
from torsh_distributed.observe.machine.diagnostic_result import CheckSeverity, worst
from torsh_distributed.observe.machine.variables import check_variables

GOOD = {
    "RANK": "5",
    "WORLD_SIZE": "8",
    "LOCAL_RANK": "1",
    "LOCAL_WORLD_SIZE": "4",
    "NODE_RANK": "1",
    "MASTER_ADDR": "10.0.0.1",
    "MASTER_PORT": "29500",
    "TORSH_LAUNCHER": "run",
}


def test_a_consistent_place_and_no_place_are_fine() -> None:
    assert [result.severity for result in check_variables(GOOD)] == [CheckSeverity.OK]
    assert [result.severity for result in check_variables({})] == [CheckSeverity.OK]


@pytest.mark.parametrize(
    ("changes", "name", "words"),
    [
        ({"RANK": "1"}, "RANK", "value of LOCAL_RANK"),
        ({"NODE_RANK": "5"}, "NODE_RANK", "looks like a rank of the job"),
        ({"RANK": "8"}, "RANK", "outside 0..7"),
        ({"LOCAL_RANK": "5"}, "LOCAL_RANK", "outside 0..3"),
        ({"MASTER_ADDR": "127.0.0.1"}, "MASTER_ADDR", "this machine itself"),
        ({"MASTER_ADDR": None}, "MASTER_ADDR", "not set"),
        ({"WORLD_SIZE": None}, "WORLD_SIZE", "RANK is set and WORLD_SIZE is not"),
        ({"RANK": "five"}, "RANK", "not a number"),
        ({"MASTER_PORT": "99999"}, "MASTER_PORT", "not a port"),
    ],
)
def test_what_does_not_fit_is_an_error_with_reason_and_remedy(
    changes: dict[str, str | None], name: str, words: str
) -> None:
    environ = {key: value for key, value in {**GOOD, **changes}.items() if value is not None}
    found = [result for result in check_variables(environ) if result.severity is CheckSeverity.ERROR]
    assert name in [result.check_name for result in found]
    assert any(words in f"{result.description} {result.reason}" for result in found)
    assert all(result.reason and result.remediation for result in found)


def test_a_misspelt_variable_of_ours_is_found() -> None:
    (found,) = check_variables({"TORSH_EVENT_DIR": "x"})
    assert "TORSH_EVENTS_DIR" in found.remediation
    assert worst([found]) is CheckSeverity.WARNING


def test_too_many_threads_and_debugging_aids_are_told() -> None:
    found = {
        result.check_name: result for result in check_variables({**GOOD, "OMP_NUM_THREADS": "4096", "TORSH_DEBUG": "1"})
    }
    assert found["OMP_NUM_THREADS"].severity is CheckSeverity.WARNING
    assert found["TORSH_DEBUG"].severity is CheckSeverity.NOTE


def test_every_variable_of_ours_is_known() -> None:
    ours = {name: "1" for name in KNOWN if name.startswith("TORSH_")}
    unknown = [result.check_name for result in check_variables(ours) if "is not a variable" in result.description]
    assert unknown == []


@pytest.mark.parametrize(
    ("old", "new"), [("NCCL_IB_CUDA_SUPPORT", "NCCL_NET_GDR_LEVEL"), ("NCCL_BLOCKING_WAIT", "TORCH_NCCL_BLOCKING_WAIT")]
)
def test_an_old_name_of_nccl_is_warned_of_with_the_new_one(old: str, new: str) -> None:
    (found,) = check_variables({old: "1"})
    assert (found.check_name, found.severity) == (old, CheckSeverity.WARNING)
    assert found.remediation is not None
    assert new in found.remediation


def test_a_variable_that_nccl_reads_is_not_warned_of() -> None:
    (found,) = check_variables({"NCCL_IB_HCA": "mlx5_0", "NCCL_CUMEM_ENABLE": "0", "NCCL_NVLS_ENABLE": "0"})
    assert found.severity is CheckSeverity.OK
