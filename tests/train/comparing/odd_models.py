"""Small language models with one odd part each, as people write them, their losses, and one process's training."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.utils.parametrizations import spectral_norm, weight_norm

VOCABULARY, LENGTH, WIDTH, HIDDEN = 17, 16, 16, 32
Function = Callable[[Tensor], Tensor]
Layer = Callable[[], nn.Module]


class FeedForward(nn.Module):
    def __init__(self, between: Function, inner: nn.Module | None = None, wrap: Any = None) -> None:
        super().__init__()
        up, down = nn.Linear(WIDTH, HIDDEN), nn.Linear(HIDDEN, WIDTH)
        self.up, self.down = (wrap(up), wrap(down)) if wrap is not None else (up, down)
        self.between, self.inner = between, inner or nn.Identity()

    def forward(self, hidden: Tensor) -> Tensor:
        return self.down(self.between(self.inner(self.up(hidden))))


class Biased(FeedForward):
    """A parameter with a value for each hidden feature."""

    def __init__(self) -> None:
        super().__init__(self.shifted)
        self.beta = nn.Parameter(torch.linspace(-1, 1, HIDDEN))

    def shifted(self, hidden: Tensor) -> Tensor:
        return functional.gelu(hidden + self.beta)


class Scaled(FeedForward):
    """One parameter for all hidden features."""

    def __init__(self) -> None:
        super().__init__(self.scaled)
        self.scale = nn.Parameter(torch.tensor(1.5))

    def scaled(self, hidden: Tensor) -> Tensor:
        return functional.gelu(hidden * self.scale)


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.num_heads = 4
        self.qkv, self.proj = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, hidden: Tensor) -> Tensor:
        batch, length, width = hidden.shape
        heads = self.qkv(hidden).view(batch, length, 3, self.num_heads, -1).permute(2, 0, 3, 1, 4)
        return self.proj(self.attend(*heads).transpose(1, 2).reshape(batch, length, width))

    def attend(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        return functional.scaled_dot_product_attention(query, key, value, is_causal=True)


class ByHand(Attention):
    def attend(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        scores = query @ key.transpose(-1, -2) / 2
        later = torch.ones(scores.shape[-2:], dtype=torch.bool).triu(1)
        return scores.masked_fill(later, float("-inf")).softmax(dim=-1) @ value


class Convolution(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv1d(WIDTH, WIDTH, 3, padding=2)

    def forward(self, hidden: Tensor) -> Tensor:
        return self.conv(hidden.transpose(1, 2))[..., : hidden.shape[1]].transpose(1, 2)


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.rnn = nn.GRU(WIDTH, WIDTH, batch_first=True)

    def forward(self, hidden: Tensor) -> Tensor:
        out: Tensor = self.rnn(hidden)[0]
        return out


class Multihead(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(WIDTH, 4, batch_first=True)

    def forward(self, hidden: Tensor) -> Tensor:
        mask = nn.Transformer.generate_square_subsequent_mask(hidden.shape[1])
        out: Tensor = self.attention(hidden, hidden, hidden, attn_mask=mask, is_causal=True, need_weights=False)[0]
        return out


class Mixed(nn.Module):
    """Mixes positions by a function."""

    def __init__(self, function: Function) -> None:
        super().__init__()
        self.function, self.layer = function, nn.Linear(WIDTH, WIDTH)

    def forward(self, hidden: Tensor) -> Tensor:
        return self.layer(self.function(hidden))


class Smoothed(nn.Module):
    """Keeps a moving mean in a buffer that it replaces."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(WIDTH, WIDTH)
        self.register_buffer("mean", torch.zeros(WIDTH))

    def forward(self, hidden: Tensor) -> Tensor:
        out: Tensor = self.layer(hidden)
        self.mean = 0.9 * self.mean + 0.1 * out.detach().mean(dim=(0, 1))
        return out


class Block(nn.Module):
    def __init__(self, feed_forward: nn.Module, mix: nn.Module) -> None:
        super().__init__()
        self.first, self.second = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.mix, self.feed_forward = mix, feed_forward

    def forward(self, hidden: Tensor) -> Tensor:
        hidden = hidden + self.mix(self.first(hidden))
        return hidden + self.feed_forward(self.second(hidden))


class Language(nn.Module):
    def __init__(self, feed_forward: Layer | None = None, mix: Layer = Attention) -> None:
        super().__init__()
        make = feed_forward or partial(FeedForward, functional.gelu)
        self.token, self.position = nn.Embedding(VOCABULARY, WIDTH), nn.Embedding(64, WIDTH)
        self.blocks = nn.ModuleList(Block(make(), mix()) for _ in range(2))
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, VOCABULARY)

    def embedded(self, ids: Tensor) -> Tensor:
        out: Tensor = self.token(ids) + self.position(torch.arange(ids.shape[1]))
        return out

    def body(self, hidden: Tensor) -> Tensor:
        for block in self.blocks:
            hidden = block(hidden)
        return self.norm(hidden)

    def forward(self, ids: Tensor) -> Tensor:
        return self.head(self.body(self.embedded(ids)))


class Prefixed(Language):
    """A learned token before the others."""

    def __init__(self) -> None:
        super().__init__()
        self.prefix = nn.Parameter(torch.linspace(-1, 1, WIDTH))

    def forward(self, ids: Tensor) -> Tensor:
        prefix = self.prefix.expand(ids.shape[0], 1, WIDTH)
        return self.head(self.body(torch.cat([prefix, self.embedded(ids)], dim=1)))[:, 1:]


class Waves(Language):
    """Counts positions in its own forward."""

    def embedded(self, ids: Tensor) -> Tensor:
        angles = torch.arange(ids.shape[1])[:, None] / (1 + torch.arange(WIDTH)[None])
        return super().embedded(ids) + angles.sin()


class Pooled(Language):
    def forward(self, ids: Tensor) -> Tensor:
        return self.head(self.body(self.embedded(ids)).mean(dim=1))


class OwnLoss(Language):
    def forward(self, ids: Tensor, labels: Tensor) -> Tensor:
        return token_loss(super().forward(ids), labels)


def token_loss(logits: Tensor, targets: Tensor) -> Tensor:
    return functional.cross_entropy(logits.flatten(0, 1), targets.flatten())


def last_token_loss(logits: Tensor, targets: Tensor) -> Tensor:
    return functional.cross_entropy(logits[:, -1], targets[:, -1])


def first_label_loss(logits: Tensor, targets: Tensor) -> Tensor:
    return functional.cross_entropy(logits, targets[:, 0])


def smooth_loss(logits: Tensor, targets: Tensor) -> Tensor:
    return token_loss(logits, targets) + 0.1 * (logits[:, 1:] - logits[:, :-1]).pow(2).mean()


def decayed_loss(model: nn.Module, logits: Tensor, targets: Tensor) -> Tensor:
    return token_loss(logits, targets) + 1e-2 * sum(param.pow(2).sum() for param in model.parameters())


def centred(hidden: Tensor) -> Tensor:
    return functional.gelu(hidden - hidden.mean(dim=-1, keepdim=True))


def shifted(hidden: Tensor) -> Tensor:
    return functional.pad(hidden[:, :-1], (0, 0, 1, 0))


def _between(function: Function) -> Layer:
    return partial(FeedForward, function)


MODELS: dict[str, tuple[Layer, Any]] = {
    "plain": (Language, token_loss),
    "centred": (partial(Language, _between(centred)), token_loss),
    "rms_norm": (partial(Language, _between(lambda u: functional.rms_norm(u, u.shape[-1:]))), token_loss),
    "softmax": (partial(Language, _between(lambda u: u.softmax(dim=-1))), token_loss),
    "normalized": (partial(Language, _between(lambda u: functional.normalize(u, dim=-1))), token_loss),
    "flipped": (partial(Language, _between(lambda u: functional.gelu(u) + u.flip(-1))), token_loss),
    "layer_norm": (partial(Language, lambda: FeedForward(functional.gelu, nn.LayerNorm(HIDDEN))), token_loss),
    "softmax_module": (partial(Language, lambda: FeedForward(functional.gelu, nn.Softmax(-1))), token_loss),
    "biased": (partial(Language, Biased), token_loss),
    "scaled": (partial(Language, Scaled), token_loss),
    "weight_norm": (partial(Language, lambda: FeedForward(functional.gelu, wrap=weight_norm)), token_loss),
    "spectral_norm": (partial(Language, lambda: FeedForward(functional.gelu, wrap=spectral_norm)), token_loss),
    "old_spectral": (partial(Language, lambda: FeedForward(functional.gelu, wrap=nn.utils.spectral_norm)), token_loss),
    "decayed": (Language, decayed_loss),
    "convolution": (partial(Language, mix=Convolution), token_loss),
    "shifted": (partial(Language, mix=lambda: Mixed(shifted)), token_loss),
    "summed": (partial(Language, mix=lambda: Mixed(lambda x: x.cumsum(dim=1) / 10)), token_loss),
    "meaned": (partial(Language, mix=lambda: Mixed(lambda x: x + x.mean(dim=1, keepdim=True))), token_loss),
    "recurrent": (partial(Language, mix=Recurrent), token_loss),
    "by_hand": (partial(Language, mix=ByHand), token_loss),
    "multihead": (partial(Language, mix=Multihead), token_loss),
    "smoothed": (partial(Language, Smoothed), token_loss),
    "prefixed": (Prefixed, token_loss),
    "waves": (Waves, token_loss),
    "pooled": (Pooled, first_label_loss),
    "last_token": (Language, last_token_loss),
    "smooth_loss": (Language, smooth_loss),
    "own_loss": (OwnLoss, None),
}


def made(name: str) -> tuple[nn.Module, Any]:
    """The model and its loss, from the same numbers in every process."""
    torch.manual_seed(3)
    build, loss = MODELS[name]
    model = build()
    return model, partial(decayed_loss, model) if loss is decayed_loss else loss


def batches(name: str, num_steps: int = 5) -> list[Any]:
    """Batches in which every other row is padded, where the loss knows of padding."""
    generator = torch.Generator().manual_seed(7)
    out: list[Any] = []
    for _ in range(num_steps):
        ids = torch.randint(VOCABULARY, (8, LENGTH + 1), generator=generator)
        inputs, targets = ids[:, :-1], ids[:, 1:].clone()
        if name not in ("pooled", "last_token"):
            targets[1::2, -5:] = -100
        out.append({"ids": inputs, "labels": targets} if MODELS[name][1] is None else (inputs, targets))
    return out


def losses_alone(name: str) -> list[float]:
    """What one process computes."""
    model, loss_fn = made(name)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    out = []
    for batch in batches(name):
        optimizer.zero_grad()
        loss = model(**batch) if loss_fn is None else loss_fn(model(batch[0]), batch[1])
        loss.backward()
        optimizer.step()
        out.append(loss.item())
    return out
