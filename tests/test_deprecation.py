"""Old names: the notice says until when, and none outlives its version."""

from __future__ import annotations

from packaging.version import Version

import torsh_distributed
from torsh_distributed.deprecation import ENDS, notice


def test_the_notice_names_the_new_name_and_the_end() -> None:
    told = notice("plan keys", "mesh.tp_size", "mesh.tp")
    assert told == "mesh.tp_size is an old name of mesh.tp, known until version 0.3; please use the new one"


def test_nothing_old_outlives_its_version() -> None:
    released = Version(Version(torsh_distributed.__version__).base_version)
    over = {kind: end for kind, end in ENDS.items() if Version(end) <= released}
    assert over == {}, "remove these names, with their tests"
