from __future__ import annotations

import pytest

from torsh_distributed.comm.meeting.between_nodes import LEG_VARIABLE, chosen_leg
from torsh_distributed.comm.trust.job_tls import CERTIFICATE_VARIABLE, KEY_VARIABLE
from torsh_distributed.errors import ConfigurationError, FeatureNotAvailable


def test_what_carries_data_is_an_option_or_a_variable_and_must_be_possible() -> None:
    assert chosen_leg(None, {}) == "gloo"
    assert chosen_leg(None, {LEG_VARIABLE: "mpi"}) == "mpi"
    assert chosen_leg("gloo", {LEG_VARIABLE: "mpi"}) == "gloo"
    with pytest.raises(ConfigurationError, match=f"{LEG_VARIABLE} must be gloo or mpi"):
        chosen_leg(None, {LEG_VARIABLE: "ib"})
    with pytest.raises(FeatureNotAvailable, match="MPI cannot encrypt"):
        chosen_leg("mpi", {CERTIFICATE_VARIABLE: "/c", KEY_VARIABLE: "/k"})
