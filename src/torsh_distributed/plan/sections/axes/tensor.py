"""How layers are split between ranks: the `tensor` section of a plan."""

from __future__ import annotations

from collections.abc import Iterator

from typing_extensions import override

from torsh_distributed.plan.problems import Problem
from torsh_distributed.plan.section import Section, Words


class TensorConfig(Section):
    """Choices of tensor parallelism; its degree is mesh.tp."""

    sequence_parallel: bool = False
    """Split activations along the sequence between the split layers too: less memory, the same bytes on the wire."""

    loss_parallel: bool = False
    """Compute cross-entropy on the vocabulary as split, without gathering the logits."""

    overrides: Words = ()
    """Modules that are split in another way than found: `pattern=style`, such as `model.layers.*.mlp.down_proj=row` or
    `lm_head=replicated`. Styles as `torsh plan show --model` prints them, or transformers' (`colwise`, `rowwise`)."""

    def override_styles(self) -> dict[str, str]:
        """Pattern to style."""
        return dict(self._pair(text) for text in self.overrides)

    @staticmethod
    def _pair(text: str) -> tuple[str, str]:
        pattern, _, style = text.partition("=")
        return pattern.strip(), style.strip()

    @override
    def find_problems(self) -> Iterator[Problem]:
        for text in self.overrides:
            if not all(self._pair(text)):
                yield Problem(
                    "tensor.overrides",
                    f"tensor.overrides: {text!r} is not of the form pattern=style",
                    "such as lm_head=replicated",
                )
