"""What torch.compile makes one graph of: the `compile` section of a plan."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from torsh_distributed.plan.section import Section


class CompileConfig(Section):
    """torch.compile: kernels fused for the model's shapes, built at the first step."""

    enabled: bool = False
    """Compile the model. The first step takes longer, often a minute; later ones are faster."""

    scope: Literal["layers", "model"] = "layers"
    """What becomes one graph: each layer that repeats, compiled once for all of them and with every parallelism; or the
    whole model and the loss, for replicas only."""

    autotune: bool = False
    """Try several kernels for each matrix product and keep the fastest. The first step takes minutes."""

    cuda_graphs: bool = False
    """Replay the kernels of a step as one recording, which saves the host's launches: for small models on a GPU with
    batches of one shape. Needs `scope = "model"`."""

    dynamic: Literal["auto", "never", "always"] = "auto"
    """Whether one graph serves several shapes: once a second shape is seen, never (each shape is compiled), or from the
    start."""

    graph_breaks: Literal["warn", "refuse"] = "warn"
    """What to do where torch cannot compile a part of a layer and runs it as it is."""

    recompile_limit: int = Field(default=64, ge=1)
    """Versions of one layer that are kept, such as for other shapes and for evaluation; later ones run as they are."""
