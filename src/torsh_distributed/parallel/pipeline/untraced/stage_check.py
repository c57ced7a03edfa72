"""Runs the stages of a model after each other and compares: what they compute together is what the model computes."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from torsh_distributed.errors import ConfigurationError
from torsh_distributed.parallel.models.probing import trying
from torsh_distributed.parallel.pipeline.microbatches import Microbatches
from torsh_distributed.parallel.pipeline.untraced.stage_clone import UntracedStage
from torsh_distributed.parallel.torch_internals import tree_leaves


def check_stages(
    make: Callable[[int], nn.Module],
    num_stages: int,
    feed: Microbatches,
    model: nn.Module,
    example: Mapping[str, Any],
) -> None:
    """Raise ConfigurationError unless the stages give the model's output on `example`; needs the whole model.

    Finds what no look at modules can: a value that a layer takes from elsewhere than the layer before.
    """
    feed.load(example, None, 1)
    with trying(model):
        expected = [leaf for leaf in tree_leaves(model(**example)) if isinstance(leaf, Tensor)]
        values: tuple[Any, ...] = ()
        for index in range(num_stages):
            stage = make(index)
            assert isinstance(stage, UntracedStage), "stages that keep the model's forward"
            stage.eval()
            try:
                values = (stage(*values),)
            except Exception as error:
                # The model's own code runs here, on a hidden state in place of its embeddings: it may raise anything.
                raise ConfigurationError(
                    f"stage {index} of {type(model).__name__} cannot run by itself: {str(error).splitlines()[0]}",
                    hint="its forward needs more than the hidden state of the layer before; set mesh.pp = 1",
                ) from error
    found = values[0] if isinstance(values[0], tuple) else values
    if len(found) != len(expected) or not all(
        torch.allclose(one, other, rtol=1e-3, atol=1e-4, equal_nan=True)
        for one, other in zip(found, expected, strict=True)
    ):
        raise ConfigurationError(
            f"the stages of {type(model).__name__} do not compute what the model computes: a layer uses something other"
            " than the result of the layer before, such as the embeddings or an earlier layer",
            hint="a pipeline sends the hidden state alone; set mesh.pp = 1",
        )
