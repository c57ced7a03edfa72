"""How attention runs over split sequences: the `context` section of a plan."""

from __future__ import annotations

from typing import Literal

from torsh_distributed.plan.section import Section


class ContextConfig(Section):
    """Choices of context parallelism; its degree is mesh.cp."""

    form: Literal["auto", "ring", "ulysses"] = "auto"
    """How a rank's queries meet the keys of other ranks: keys and values pass around a ring, or ranks exchange
    positions for heads in an all-to-all (ulysses), for which mesh.cp must divide the heads. `auto` exchanges heads
    where they divide, except under a sliding window over 1024 positions or more, where a ring skips what is hidden."""
