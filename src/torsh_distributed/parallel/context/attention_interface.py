"""Attention of transformers models over split sequences, through the registry in which they look their attention up.

`transformers.AttentionInterface` and `AttentionMaskInterface` map a name in the model's config to functions. While
sequences are split, the config names ours: the mask function keeps the rule by which the model masks, in place of a
tensor for the positions that this rank has; the attention function applies it to the whole sequence.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from torsh_distributed.errors import FeatureNotAvailable
from torsh_distributed.parallel.context.attention_heads import heads_attention
from torsh_distributed.parallel.context.attention_ring import ring_attention
from torsh_distributed.parallel.context.positions import Form, PositionMask, choose_form, holds_tensors

AttentionFn = Callable[..., tuple[Tensor, None]]
MaskFn = Callable[..., Any]

_HARMLESS = ("position_ids", "cache_position", "shift_labels", "position_embeddings", "token_type_ids", "labels")
"""Tensors among the arguments of an attention that do not enter its result."""

_numbers = itertools.count()


def register(attention: AttentionFn, mask: MaskFn) -> str:
    """Add functions to transformers' registries; returns the name under which a config finds them."""
    from transformers import AttentionInterface
    from transformers.masking_utils import AttentionMaskInterface

    name = f"torsh_context_{next(_numbers)}"
    AttentionInterface.register(name, attention)
    AttentionMaskInterface.register(name, mask)
    return name


def unregister(name: str) -> None:
    """Take the functions of `register` out again."""
    from transformers import AttentionInterface
    from transformers.masking_utils import AttentionMaskInterface

    AttentionInterface._global_mapping.pop(name, None)
    AttentionMaskInterface._global_mapping.pop(name, None)


def configs_of(model: nn.Module) -> list[Any]:
    """The configs in which the modules of a model look their attention up."""
    found = {}
    for module in model.modules():
        config = getattr(module, "config", None)
        if config is not None and hasattr(config, "_attn_implementation"):
            found[id(config)] = config
    return list(found.values())


@contextmanager
def implementing(configs: list[Any], name: str) -> Iterator[None]:
    """Let models with these configs use the attention of this name."""
    before = [config._attn_implementation_internal for config in configs]
    for config in configs:
        config._attn_implementation_internal = name
    try:
        yield
    finally:
        for config, old in zip(configs, before, strict=True):
            config._attn_implementation_internal = old


def mask_rule(mask_function: Callable[..., Any], use_vmap: bool = False, **_: object) -> PositionMask:
    """What a model asks of its mask, as transformers describes it: a function of positions."""
    from transformers import masking_utils

    if mask_function is masking_utils.causal_mask_function:
        return PositionMask(is_causal=True)
    if mask_function is masking_utils.bidirectional_mask_function:
        return PositionMask()
    if use_vmap or holds_tensors(mask_function):
        raise FeatureNotAvailable(
            "the model masks attention by values of the batch, not by positions alone, which context parallelism does"
            " not know",
            hint="set mesh.cp = 1",
        )
    return PositionMask(allowed=mask_function)


class SplitAttention:
    """Attention of this rank's positions to the whole sequence: what a config names while sequences are split."""

    def __init__(self, group: dist.ProcessGroup, form: Form) -> None:
        self.group, self.form = group, form
        self.keys: Tensor | None = None
        """(batch, length) of the whole sequences: False for padding."""
        self.documents: Tensor | None = None
        """(batch, length): which of the sequences packed into a row."""
        self.first_row: Callable[[int], int] = _from_the_first
        """From the number of rows that a forward works on to the first of them: that of its microbatch."""

    def rule(self, batch_size: int, **description: Any) -> PositionMask:
        """The model's mask with the padding and packing of the rows that it runs on: a batch, or a microbatch of it."""
        rule = mask_rule(**description)
        if self.keys is None and self.documents is None:
            return rule
        first = self.first_row(batch_size)
        whole = PositionMask(rule.is_causal, rule.allowed, self.keys, self.documents)
        return whole.rows(first, first + batch_size)

    def __call__(
        self,
        module: nn.Module,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Any,
        dropout: float = 0.0,
        scaling: float | None = None,
        is_causal: bool | None = None,
        softcap: float | None = None,
        s_aux: Tensor | None = None,
        **kwargs: Any,
    ) -> tuple[Tensor, None]:
        """As transformers calls it: heads before positions in, positions before heads out. `s_aux` are its sinks."""
        require_known(module, attention_mask, kwargs)
        if attention_mask is None and (self.keys is not None or self.documents is not None):
            raise FeatureNotAvailable(
                f"{type(module).__name__} gets no mask from its model, so it cannot leave out padding",
                hint="train it with sequences of one length, or set mesh.cp = 1",
            )
        causal = getattr(module, "is_causal", True) if is_causal is None else is_causal
        rule = PositionMask(is_causal=causal) if attention_mask is None else attention_mask
        if isinstance(query, DTensor):
            # Heads are split over another axis: each rank attends with its own.
            placements = query.placements
            q, k, v = (one.redistribute(placements=placements).to_local() for one in (query, key, value))  # type: ignore[attr-defined]  # alike
            out = self._attend(q, k, v, rule, scaling, dropout, softcap, s_aux)
            whole = DTensor.from_local(out, query.device_mesh, placements, run_check=False)
            return whole.transpose(1, 2), None
        whole_heads = self._attend(query, key, value, rule, scaling, dropout, softcap, s_aux)
        return whole_heads.transpose(1, 2).contiguous(), None

    def _attend(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        rule: PositionMask,
        scale: float | None,
        dropout_p: float,
        softcap: float | None,
        sinks: Tensor | None,
    ) -> Tensor:
        size = self.group.size()
        length = query.shape[2] * size
        form = choose_form(self.form, heads=query.shape[1], size=size, length=length, mask=rule, dropout_p=dropout_p)
        attend = partial(ring_attention if form == "ring" else heads_attention, query, key, value, group=self.group)
        attend = partial(attend, mask=rule, scale=scale, softcap=softcap, sinks=sinks)
        if form == "ulysses":
            return attend(dropout_p=dropout_p)
        if dropout_p > 0:
            raise FeatureNotAvailable(
                "ring attention has no dropout",
                hint='set the dropout of attention to 0 in the model\'s config, or context.form = "ulysses"',
                dropout_p=dropout_p,
            )
        return attend()


def require_known(module: nn.Module, mask: Any, kwargs: Mapping[str, Any]) -> None:
    """Refuse arguments of an attention that change its result in a way we do not know."""
    unknown = [name for name, value in kwargs.items() if isinstance(value, Tensor) and name not in _HARMLESS]
    if mask is not None and not isinstance(mask, PositionMask):
        unknown.append("attention_mask")
    if kwargs.get("output_attentions"):
        unknown.append("output_attentions")
    if unknown:
        raise FeatureNotAvailable(
            f"{type(module).__name__} takes {unknown[0]}, which attention over split sequences does not know",
            hint="set mesh.cp = 1; mesh.tp splits the heads of any attention",
            arguments=unknown,
        )


def _from_the_first(num_rows: int) -> int:
    return 0
