"""Small language models, one process's training of them, and what parallel runs are compared with."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional

from torsh_distributed.train.demos.gpt import CharGPT, next_character_loss

VOCABULARY, LENGTH, BATCH = 29, 16, 8


class Rotary(nn.Module):
    """A Llama-shaped block: grouped-query attention with rotary positions, gated feed-forward, RMSNorm."""

    def __init__(self, width: int, heads: int, shared: int) -> None:
        super().__init__()
        self.num_heads, self.num_key_value_heads, self.head_dim = heads, shared, width // heads
        self.attention_norm = nn.RMSNorm(width)
        self.q_proj = nn.Linear(width, width, bias=False)
        self.k_proj = nn.Linear(width, shared * self.head_dim, bias=False)
        self.v_proj = nn.Linear(width, shared * self.head_dim, bias=False)
        self.o_proj = nn.Linear(width, width, bias=False)
        self.mlp_norm = nn.RMSNorm(width)
        self.mlp = Gated(width)

    def forward(self, hidden: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        batch, length, width = hidden.shape
        normed = self.attention_norm(hidden)
        query = rotate(self.q_proj(normed).view(batch, length, self.num_heads, -1), cos, sin)
        key = rotate(self.k_proj(normed).view(batch, length, self.num_key_value_heads, -1), cos, sin)
        value = self.v_proj(normed).view(batch, length, self.num_key_value_heads, -1)
        groups = self.num_heads // self.num_key_value_heads
        key, value = (
            part[:, :, :, None].expand(-1, -1, -1, groups, -1).reshape(batch, length, self.num_heads, -1)
            for part in (key, value)
        )
        attended = functional.scaled_dot_product_attention(
            query.transpose(1, 2), key.transpose(1, 2), value.transpose(1, 2), is_causal=True
        )
        hidden = hidden + self.o_proj(attended.transpose(1, 2).reshape(batch, length, width))
        return hidden + self.mlp(self.mlp_norm(hidden))


class Gated(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(width, 2 * width, bias=False)
        self.up_proj = nn.Linear(width, 2 * width, bias=False)
        self.down_proj = nn.Linear(2 * width, width, bias=False)

    def forward(self, hidden: Tensor) -> Tensor:
        return self.down_proj(functional.silu(self.gate_proj(hidden)) * self.up_proj(hidden))


def rotate(heads: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    first, second = heads.chunk(2, dim=-1)
    return heads * cos + torch.cat([-second, first], dim=-1) * sin


class Llama(nn.Module):
    """Blocks in a ModuleList, rotary tables in buffers, logits by a tied head."""

    def __init__(self, width: int = 32, heads: int = 4, shared: int = 2, num_layers: int = 2) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(VOCABULARY, width)
        self.layers = nn.ModuleList(Rotary(width, heads, shared) for _ in range(num_layers))
        self.norm = nn.RMSNorm(width)
        self.lm_head = nn.Linear(width, VOCABULARY, bias=False)
        self.lm_head.weight = self.embed_tokens.weight
        angles = torch.outer(torch.arange(64.0), 0.5 ** torch.arange(0, width // heads, 2)).repeat(1, 2)
        self.register_buffer("cos", angles.cos()[:, None, :])
        self.register_buffer("sin", angles.sin()[:, None, :])

    def forward(self, ids: Tensor) -> Tensor:
        hidden = self.embed_tokens(ids)
        cos, sin = self.cos[: ids.shape[1]], self.sin[: ids.shape[1]]
        for layer in self.layers:
            hidden = layer(hidden, cos, sin)
        return self.lm_head(self.norm(hidden))


def build(kind: str = "gpt", *, num_layers: int = 2) -> nn.Module:
    """The model that every rank and the single process start from."""
    torch.manual_seed(5)
    if kind == "llama":
        return Llama(num_layers=num_layers)
    model = CharGPT(VOCABULARY, width=32, num_layers=num_layers)
    if kind == "tied":
        model.head.weight = model.token.weight
    return model


def batches(num_steps: int, *, batch: int = BATCH) -> list[tuple[Tensor, Tensor]]:
    """Inputs and targets of each step, the same in every process."""
    generator = torch.Generator().manual_seed(11)
    text = [torch.randint(VOCABULARY, (batch, LENGTH + 1), generator=generator) for _ in range(num_steps)]
    # A rule to learn, so that losses fall: every second character is a function of the one before it.
    for ids in text:
        ids[:, 1::2] = (ids[:, :-1:2] * 3 + 1) % VOCABULARY
    return [(ids[:, :-1], ids[:, 1:]) for ids in text]


def train_alone(kind: str = "gpt", *, num_steps: int = 5, clip: float = 0.5, num_layers: int = 2) -> list[float]:
    """Losses and gradient norms, one after the other, of plain torch in one process."""
    model = build(kind, num_layers=num_layers)
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-3)
    out = []
    for inputs, targets in batches(num_steps):
        optimizer.zero_grad()
        loss = next_character_loss(model(inputs), targets)
        loss.backward()
        norm = nn.utils.clip_grad_norm_(model.parameters(), clip)
        optimizer.step()
        out += [loss.item(), norm.item()]
    return out
