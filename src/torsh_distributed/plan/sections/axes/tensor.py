"""How layers are split between ranks: the `tensor` section of a plan."""

from __future__ import annotations

from torsh_distributed.plan.section import Section


class TensorConfig(Section):
    """Choices of tensor parallelism; its degree is mesh.tp."""

    sequence_parallel: bool = False
    """Split activations along the sequence between the split layers too: less memory, the same bytes on the wire."""

    loss_parallel: bool = False
    """Compute cross-entropy on the vocabulary as split, without gathering the logits."""
