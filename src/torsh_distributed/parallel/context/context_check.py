"""Whether a model can run on a part of its sequences: found out by running it on a few tokens, before training.

With an attention that looks at one position only, everything a model computes at a position must depend on the token
and the position there and nothing else. So the model is run twice, the second time with tokens and position ids in
another order: results must be the same in that order. A convolution, a scan over the sequence, an attention that is not
looked up in the registry, or positions that are counted inside the model show up, whatever the model is.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from torsh_distributed.errors import ConfigurationError, TorshError
from torsh_distributed.parallel.context import attention_interface
from torsh_distributed.parallel.context.attention_interface import configs_of, implementing, mask_rule, require_known
from torsh_distributed.parallel.context.positions import Form
from torsh_distributed.parallel.models.anatomy import ModelAnatomy, anatomy_of
from torsh_distributed.parallel.models.example_inputs import LENGTH, example_inputs, takes, takes_any
from torsh_distributed.parallel.models.label_share import shifts_labels
from torsh_distributed.parallel.models.probing import trying
from torsh_distributed.parallel.torch_internals import tree_leaves

_ORDER = (3, 6, 1, 7, 0, 5, 2, 4)


@dataclass(frozen=True)
class AttentionFacts:
    """What a run of the model showed about its attention."""

    heads: tuple[int, ...]
    """Query heads of each attention."""
    dropout: float
    """The largest dropout of attention in training."""
    takes_shifted: bool
    """Whether its own loss takes labels that are shifted already."""


@dataclass
class _Seen:
    """What the attention modules of a model were called with, by module."""

    heads: dict[nn.Module, int] = field(default_factory=dict)
    dropouts: dict[nn.Module, float] = field(default_factory=dict)

    def attend(
        self, module: nn.Module, query: Tensor, key: Tensor, value: Tensor, mask: Any, **kwargs: Any
    ) -> tuple[Tensor, None]:
        """Looks at one position only, and depends on all that it is given there."""
        for known in ("dropout", "s_aux"):
            kwargs.pop(known, None)
        require_known(module, mask, kwargs)
        self.heads[module] = query.shape[1]
        self.dropouts[module] = _dropout(module)
        repeats = query.shape[1] // key.shape[1]
        keys, values = (one.repeat_interleave(repeats, dim=1) for one in (key, value))
        out = values + query.mean(dim=-1, keepdim=True) + keys.mean(dim=-1, keepdim=True)
        return out.transpose(1, 2).contiguous(), None


def check_context(model: nn.Module, *, cp: int, tp: int, form: Form) -> AttentionFacts:
    """Raise ConfigurationError, naming the module, unless the model can run on parts of sequences; needs all of it."""
    _require_sequence(model)
    anatomy = anatomy_of(model)
    seen = _Seen()
    name = attention_interface.register(seen.attend, mask_rule)
    try:
        with trying(model), implementing(configs_of(model), name):
            _check_positions(model, anatomy, seen)
            takes_shifted = _takes_shifted_labels(model)
    finally:
        attention_interface.unregister(name)
    facts = AttentionFacts(tuple(seen.heads.values()), max(seen.dropouts.values()), takes_shifted)
    _require_form(model, facts, cp=cp, tp=tp, form=form)
    return facts


def _require_sequence(model: Any) -> None:
    kind, config = type(model).__name__, model.config
    if getattr(config, "is_encoder_decoder", False):
        raise ConfigurationError(
            f"{kind} is an encoder and a decoder with sequences of their own, which mesh.cp cannot split together",
            hint="set mesh.cp = 1; mesh.tp, mesh.shard and mesh.dp split it",
        )
    if getattr(model, "main_input_name", "input_ids") != "input_ids":
        raise ConfigurationError(
            f"{kind} makes its sequence itself from {model.main_input_name}, so mesh.cp cannot split it in the batch",
            hint="set mesh.cp = 1; mesh.tp, mesh.shard and mesh.dp split it",
        )
    if getattr(config, "output_router_logits", False):
        raise ConfigurationError(
            f"{kind} has output_router_logits = True: its load-balancing loss is over the tokens of whole sequences",
            hint="set model.config.output_router_logits = False",
            key="mesh.cp",
        )


def _check_positions(model: nn.Module, anatomy: ModelAnatomy, seen: _Seen) -> None:
    example = example_inputs(model)
    positions = torch.arange(LENGTH, device=example["input_ids"].device)[None]
    kept: list[dict[str, Tensor]] = [{}, {}]
    outputs = []
    for number, order in enumerate((list(range(LENGTH)), list(_ORDER))):
        inputs = {**example, "input_ids": example["input_ids"][:, order]}
        if takes(model, "attention_mask"):
            inputs["attention_mask"] = torch.ones_like(inputs["input_ids"])
        if takes(model, "position_ids"):
            inputs["position_ids"] = positions[:, order]
        handles = [
            model.get_submodule(name).register_forward_pre_hook(_keep(kept[number], name), with_kwargs=True)
            for name in anatomy.layers
        ]
        try:
            outputs.append(model(**inputs))
        except TorshError:
            raise
        except Exception as error:
            # The model's own code runs here with an attention that it may not know: it may raise anything.
            raise _unknown_attention(model, next(reversed(kept[number]), anatomy.layers[0])) from error
        finally:
            for handle in handles:
                handle.remove()
    results = [_with_positions(out) for out in outputs]
    if results[0] is None or results[1] is None:
        raise ConfigurationError(
            f"the output of {type(model).__name__} has no value for each position, so its loss is not a mean over"
            " positions and cannot be computed from parts of a sequence",
            hint="set mesh.cp = 1; mesh.tp, mesh.shard and mesh.dp split it",
        )
    if not seen.heads:
        raise _unknown_attention(model, anatomy.layers[0])
    if not _same(results[0], results[1]):
        raise _named(model, anatomy, kept)


def _named(model: nn.Module, anatomy: ModelAnatomy, kept: list[dict[str, Tensor]]) -> ConfigurationError:
    """The error for a model whose positions depend on each other, with the first module to show it."""
    differing = [name for name in anatomy.layers if name in kept[0] and not _same(kept[0][name], kept[1][name])]
    if anatomy.layers[0] in differing:
        return ConfigurationError(
            f"{type(model).__name__} counts positions itself: what enters {anatomy.layers[0]} depends on where a token"
            " stands in this rank's part",
            hint="its forward must take position_ids and use them; or set mesh.cp = 1",
            takes_position_ids=takes(model, "position_ids"),
        )
    layers = anatomy.layers
    culprit = layers[layers.index(differing[0]) - 1] if differing else layers[-1]
    return _unknown_attention(model, culprit)


def _unknown_attention(model: nn.Module, layer: str) -> ConfigurationError:
    return ConfigurationError(
        f"{layer} of {type(model).__name__} mixes positions in another way than by the attention that transformers'"
        " AttentionInterface gives it: attention of its own, a convolution, or a scan",
        hint="set mesh.cp = 1, or write its attention with ALL_ATTENTION_FUNCTIONS.get_interface(…)",
        layer=type(model.get_submodule(layer)).__name__,
    )


def _takes_shifted_labels(model: nn.Module) -> bool:
    """Whether the model's own loss is the mean over the labels of this rank's positions, if they are shifted before."""
    if not takes(model, "labels"):
        return False
    example = example_inputs(model)
    ids = example["input_ids"]
    if not shifts_labels(model):  # classes of tokens may be fewer than tokens
        logits = getattr(model(**example), "logits", None)
        ids = ids.clamp(max=logits.shape[-1] - 1) if isinstance(logits, Tensor) and logits.dim() == 3 else ids
    inputs = {**example, "labels": ids}
    if shifts_labels(model):
        if not takes_any(model):
            return False
        inputs["shift_labels"] = ids
    out = model(**inputs)
    logits, loss = getattr(out, "logits", None), getattr(out, "loss", None)
    if not isinstance(logits, Tensor) or not isinstance(loss, Tensor) or logits.dim() != 3:
        return False
    fits = ids.clamp(max=logits.shape[-1] - 1)
    expected = functional.cross_entropy(logits.float().flatten(0, 1), fits.flatten())
    return bool(torch.isclose(loss.float(), expected, rtol=1e-3, atol=1e-4))


def _require_form(model: nn.Module, facts: AttentionFacts, *, cp: int, tp: int, form: Form) -> None:
    kind = type(model).__name__
    uneven = next((heads for heads in facts.heads if (heads // tp if heads % tp == 0 else heads) % cp), None)
    if form == "ulysses" and uneven is not None:
        shared = f" on each of mesh.tp {tp}" if tp > 1 else ""
        raise ConfigurationError(
            f'context.form "ulysses": mesh.cp {cp} does not divide the {uneven // tp} attention heads of'
            f" {kind}{shared}",
            hint='use context.form = "ring" or "auto"',
        )
    if facts.dropout > 0 and (form == "ring" or (form == "auto" and uneven is not None)):
        raise ConfigurationError(
            f"ring attention has no dropout, and {kind} has {facts.dropout:g} in its attention",
            hint='set it to 0 in the model\'s config, or use context.form = "ulysses" where mesh.cp divides the heads',
        )


def _dropout(module: nn.Module) -> float:
    """The dropout of an attention module in training, under the names that it has in transformers."""
    found = [getattr(module, name, 0.0) for name in ("attention_dropout", "attn_dropout", "dropout", "dropout_prob")]
    values = [one.p if isinstance(one, nn.Dropout) else one for one in found]
    return max((float(one) for one in values if isinstance(one, int | float)), default=0.0)


def _keep(kept: dict[str, Tensor], name: str) -> Callable[..., None]:
    def hook(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        hidden = args[0] if args else kwargs.get("hidden_states")
        if isinstance(hidden, Tensor) and hidden.dim() > 1 and hidden.shape[1] == LENGTH:
            kept[name] = hidden

    return hook


def _with_positions(output: Any) -> Tensor | None:
    """The first of a model's results that has a value for each position."""
    for leaf in tree_leaves(output):
        if isinstance(leaf, Tensor) and leaf.dim() > 1 and leaf.shape[1] == LENGTH and leaf.is_floating_point():
            return leaf
    return None


def _same(first: Tensor, second: Tensor) -> bool:
    moved = first[:, list(_ORDER)].float()
    return torch.allclose(moved, second.float(), rtol=1e-3, atol=1e-3 * float(moved.abs().max()) + 1e-5)
