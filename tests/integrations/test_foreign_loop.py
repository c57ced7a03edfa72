"""What a foreign loop cannot do, or has settings of its own for, is refused when the strategy is made."""

from __future__ import annotations

import pytest

from torsh_distributed.errors import ConfigurationError
from torsh_distributed.integrations.foreign_loop import ForeignLoop
from torsh_distributed.plan import Plan


@pytest.mark.parametrize(
    ("plan", "said"),
    [
        (Plan(dp=1, tp=2), r"mesh\.tp does not work in Lightning's loop"),
        (Plan(dp=1, pp=2), r"mesh\.pp does not work"),
        (Plan(training={"gradient_clipping": 1.0}), r"training\.gradient_clipping = 1.0 has no effect in Lightning's"),
        (Plan(precision={"dtype": "bf16"}), r"precision\.dtype = bf16 has no effect"),
    ],
)
def test_what_needs_our_loop_is_refused(plan: Plan, said: str) -> None:
    with pytest.raises(ConfigurationError, match=said):
        ForeignLoop(plan, trainer="Lightning")
