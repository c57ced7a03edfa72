"""A character GPT on twenty of Shakespeare's sonnets (public domain): small enough for two cores and two minutes."""

from __future__ import annotations

from importlib.resources import files

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import DataLoader, Dataset
from typing_extensions import override

from torsh_distributed.plan import TrainingConfig
from torsh_distributed.train.demos.base import Demo

CONTEXT = 64


class Block(nn.Module):
    """Attention and a feed-forward layer, each with a residual connection around it."""

    def __init__(self, width: int, num_heads: int) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.attention_norm = nn.LayerNorm(width)
        self.query_key_value = nn.Linear(width, 3 * width)
        self.projection = nn.Linear(width, width)
        self.feed_forward_norm = nn.LayerNorm(width)
        self.feed_forward = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    @override
    def forward(self, hidden: Tensor) -> Tensor:
        batch, length, width = hidden.shape
        split = self.query_key_value(self.attention_norm(hidden)).view(batch, length, 3, self.num_heads, -1)
        query, key, value = split.permute(2, 0, 3, 1, 4)
        attended = functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        hidden = hidden + self.projection(attended.transpose(1, 2).reshape(batch, length, width))
        out: Tensor = hidden + self.feed_forward(self.feed_forward_norm(hidden))
        return out


class CharGPT(nn.Module):
    """A decoder-only transformer over characters. In: (batch, length) ids; out: (batch, length, vocabulary) logits."""

    def __init__(self, vocabulary: int, *, width: int = 128, num_layers: int = 3, num_heads: int = 4) -> None:
        super().__init__()
        self.token = nn.Embedding(vocabulary, width)
        self.position = nn.Embedding(CONTEXT, width)
        self.blocks = nn.Sequential(*(Block(width, num_heads) for _ in range(num_layers)))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, vocabulary, bias=False)

    @override
    def forward(self, ids: Tensor) -> Tensor:
        places = torch.arange(ids.shape[1], device=ids.device)
        logits: Tensor = self.head(self.norm(self.blocks(self.token(ids) + self.position(places))))
        return logits


class Windows(Dataset[tuple[Tensor, Tensor]]):
    """Every window of CONTEXT characters, with the same window one character later as its target."""

    def __init__(self, ids: Tensor) -> None:
        self._ids = ids

    def __len__(self) -> int:
        return len(self._ids) - CONTEXT

    @override
    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        return self._ids[index : index + CONTEXT], self._ids[index + 1 : index + CONTEXT + 1]


def next_character_loss(logits: Tensor, targets: Tensor) -> Tensor:
    """Mean cross-entropy of the next character, in nats."""
    return functional.cross_entropy(logits.flatten(0, 1), targets.flatten())


def build(training: TrainingConfig) -> Demo:
    """The demo with the batch size, learning rate and seed of a plan."""
    text = files(__package__).joinpath("sonnets.txt").read_text()
    alphabet = sorted(set(text))
    ids = torch.tensor([alphabet.index(character) for character in text])
    torch.manual_seed(training.seed)
    model = CharGPT(len(alphabet))

    @torch.no_grad()
    def continue_text(trained: nn.Module, device: torch.device, prompt: str = "Shall I ", length: int = 160) -> str:
        generator = torch.Generator().manual_seed(training.seed)
        trained.eval()
        out = [alphabet.index(character) for character in prompt]
        for _ in range(length):
            logits = trained(torch.tensor(out[-CONTEXT:], device=device).unsqueeze(0))[0, -1].cpu()
            out.append(int(torch.multinomial(torch.softmax(logits / 0.7, dim=0), 1, generator=generator)))
        return "".join(alphabet[i] for i in out)

    return Demo(
        name="gpt",
        description=f"character GPT, {len(alphabet)} characters, {len(text):,} of text",
        model=model,
        loader=DataLoader(Windows(ids), batch_size=training.batch_size, shuffle=True, drop_last=True),
        loss_fn=next_character_loss,
        optimizer=torch.optim.AdamW(model.parameters(), lr=training.learning_rate),
        tokens_per_sample=CONTEXT,
        sample=continue_text,
    )
