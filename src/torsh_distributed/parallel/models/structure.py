"""Finds which layers of a transformer belong together, by class, name and shape.

The names are those that widely used models give their layers; others can be named with overrides.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from torch import Tensor, nn

FUSED_QKV = frozenset({"qkv", "qkv_proj", "c_attn", "query_key_value", "in_proj", "wqkv", "to_qkv", "attn_qkv"})
QUERY = frozenset({"q", "q_proj", "query", "wq", "to_q", "query_proj"})
KEY_VALUE = frozenset(
    {"k", "k_proj", "key", "wk", "to_k", "key_proj", "v", "v_proj", "value", "wv", "to_v", "value_proj"}
)
ATTENTION_OUT = frozenset(
    {"o", "o_proj", "out_proj", "wo", "c_proj", "proj", "projection", "dense", "to_out", "out", "output"}
)
UP = frozenset(
    {"up", "up_proj", "gate", "gate_proj", "fc1", "c_fc", "w1", "w3", "fc_in", "linear1", "dense_h_to_4h", "wi", "lin1"}
)
DOWN = frozenset({"down", "down_proj", "fc2", "c_proj", "w2", "fc_out", "linear2", "dense_4h_to_h", "wo", "lin2"})
POSITIONS = frozenset(
    {"position", "positions", "wpe", "pos", "pos_emb", "pos_embed", "position_embedding", "position_embeddings"}
    | {"positional_embedding", "embed_positions", "pos_embedding"}
)
HEAD = frozenset({"head", "lm_head", "output", "output_projection", "unembed", "embed_out", "decoder", "to_logits"})

LATENT = frozenset({"q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "kv_b_proj"})

HEAD_COUNTS = ("num_heads", "n_heads", "n_head", "num_attention_heads", "heads", "nhead", "nheads")
KEY_VALUE_COUNTS = ("num_key_value_heads", "num_kv_heads", "n_kv_heads", "n_kv_head", "kv_heads")

_ELEMENTWISE = (nn.GELU, nn.ReLU, nn.SiLU, nn.Tanh, nn.Sigmoid, nn.ELU, nn.LeakyReLU, nn.Mish, nn.ReLU6, nn.Softplus)
_HARMLESS = (*_ELEMENTWISE, nn.Dropout, nn.Identity)


@dataclass(frozen=True)
class Attention:
    """The layers of one attention module, by role, and its heads."""

    where: str
    fused: str | None
    split: tuple[str, ...]
    out: str
    num_heads: int | None
    num_key_value_heads: int | None


@dataclass(frozen=True)
class FeedForward:
    """The layers of one feed-forward module: those that widen, and the one that narrows again."""

    where: str
    up: tuple[str, ...]
    down: str
    is_elementwise: bool
    """Whether only element-wise modules are in between: then pieces need not know the whole width."""


def attentions(model: nn.Module) -> Iterator[Attention]:
    """Every module whose direct children are the linear layers of an attention."""
    for where, parent in model.named_modules():
        linears = _linears(parent)
        fused = next((name for name in linears if name.lower() in FUSED_QKV), None)
        split = tuple(name for name in linears if name.lower() in QUERY | KEY_VALUE)
        out = next((name for name in linears if name.lower() in ATTENTION_OUT), None)
        if out is None or (fused is None and len(split) != 3) or uses_weights(parent):
            continue
        heads = head_count(parent)
        yield Attention(
            where,
            None if fused is None else _join(where, fused),
            () if fused is not None else tuple(_join(where, name) for name in split),
            _join(where, out),
            heads,
            key_value_head_count(parent) or heads,
        )


def uses_weights(module: nn.Module) -> bool:
    """Whether the code of a module takes the weights of its layers instead of calling them, as torchvision's Swin."""
    code = getattr(type(module).forward, "__code__", None)
    return code is not None and "weight" in code.co_names


def feed_forwards(model: nn.Module) -> Iterator[FeedForward]:
    """Every module whose direct children widen and narrow again, or a Sequential that does so."""
    for where, parent in model.named_modules():
        linears = _linears(parent)
        found = _sequential(linears, parent) if isinstance(parent, nn.Sequential) else _named(linears, parent)
        if found is not None:
            up, down, is_elementwise = found
            yield FeedForward(where, tuple(_join(where, name) for name in up), _join(where, down), is_elementwise)


def attention_modules(model: nn.Module) -> Iterator[str]:
    """Every module that projects to queries: separately, fused with keys and values, or through a latent."""
    for where, module in model.named_modules():
        names = {name.lower() for name, child in module.named_children() if widths(child) is not None}
        if isinstance(module, nn.MultiheadAttention) or names & (FUSED_QKV | QUERY | LATENT):
            yield where


def expert_modules(model: nn.Module) -> Iterator[str]:
    """Every module whose parameters have an entry for each expert, and every list of whole experts."""
    for where, module in model.named_modules():
        stacks = [param.shape[0] for param in module.parameters(recurse=False) if param.dim() == 3]
        num_experts = getattr(module, "num_experts", None)
        is_stacked = len(set(stacks)) == 1 and stacks[0] > 1 and (len(stacks) > 1 or stacks[0] == num_experts)
        if is_stacked or (isinstance(module, nn.ModuleList) and where.rpartition(".")[2] == "experts"):
            yield where


def widths(module: nn.Module) -> tuple[int, int] | None:
    """Input and output features of a linear layer, also under an adapter; None for another module.

    Some models keep the matrix transposed: (in, out), with `nx` and `nf` features (Conv1D of GPT-2).
    """
    if isinstance(module, nn.Linear):
        return (module.in_features, module.out_features) if has_own_weight(module) else None
    if is_transposed(module):
        weight = module.weight
        assert isinstance(weight, Tensor), "is_transposed looks at it"
        return weight.shape[0], weight.shape[1]
    base = getattr(module, "base_layer", None)
    return widths(base) if isinstance(base, nn.Module) else None


def is_transposed(module: nn.Module) -> bool:
    """Whether a module is a linear layer that keeps its matrix as (in, out)."""
    weight = getattr(module, "weight", None)
    nx, nf = getattr(module, "nx", None), getattr(module, "nf", None)
    return isinstance(weight, Tensor) and weight.dim() == 2 and isinstance(nf, int) and nx is not None


def _sequential(linears: Mapping[str, nn.Linear], parent: nn.Sequential) -> tuple[tuple[str, ...], str, bool] | None:
    """The only two neighbours that widen and narrow again, with element-wise modules between them."""
    members = list(parent.named_children())
    found: list[tuple[str, str]] = []
    last: str | None = None
    for name, child in members:
        if name in linears:
            if last is not None and _is_pair(linears[last], linears[name]):
                found.append((last, name))
            last = name
        elif not isinstance(child, _HARMLESS):
            last = None
    if len(found) != 1:
        return None
    ((first, second),) = found
    return (first,), second, True


def _is_pair(up: nn.Linear, down: nn.Linear) -> bool:
    return up.out_features == down.in_features and up.in_features == down.out_features


def _named(linears: Mapping[str, nn.Linear], parent: nn.Module) -> tuple[tuple[str, ...], str, bool] | None:
    up = tuple(name for name in linears if name.lower() in UP)
    down = next((name for name in linears if name.lower() in DOWN and name not in up), None)
    if not up or down is None or any(linears[name].out_features != linears[down].in_features for name in up):
        return None
    others = [child for name, child in parent.named_children() if name not in (*up, down)]
    return up, down, all(isinstance(child, _HARMLESS) for child in others)


def is_norm(module: nn.Module) -> bool:
    """Whether a module normalises each position by itself."""
    return isinstance(module, nn.LayerNorm | nn.RMSNorm) or type(module).__name__.endswith(("LayerNorm", "RMSNorm"))


def is_position_table(name: str, module: nn.Module) -> bool:
    """Whether an embedding holds positions, not tokens."""
    return isinstance(module, nn.Embedding) and name.rpartition(".")[2].lower() in POSITIONS


def is_head(name: str, module: nn.Module) -> bool:
    """Whether a linear layer gives the logits: by its name, near the root of the model."""
    is_named = name.rpartition(".")[2].lower() in HEAD and name.count(".") <= 1
    return is_named and isinstance(module, nn.Linear) and has_own_weight(module)


def _linears(parent: nn.Module) -> dict[str, nn.Linear]:
    linears = {name: child for name, child in parent.named_children() if isinstance(child, nn.Linear)}
    return {name: child for name, child in linears.items() if has_own_weight(child)}


def has_own_weight(module: nn.Module) -> bool:
    """Whether the weight is a parameter; `weight_norm` and `spectral_norm` compute it, from all of another one."""
    return "weight" in module._parameters


def head_count(attention: nn.Module) -> int | None:
    """The number of heads that a module or its configuration names."""
    return _count(attention, HEAD_COUNTS)


def key_value_head_count(attention: nn.Module) -> int | None:
    """The number of key-value heads that a module or its configuration names."""
    return _count(attention, KEY_VALUE_COUNTS)


def _count(parent: nn.Module, names: tuple[str, ...]) -> int | None:
    for owner in (parent, getattr(parent, "config", None)):
        for name in names:
            value = getattr(owner, name, None)
            if isinstance(value, int) and value > 0:
                return value
    return None


def _join(where: str, name: str) -> str:
    return f"{where}.{name}" if where else name
