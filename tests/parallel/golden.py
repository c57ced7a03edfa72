"""Small models, their data, and the losses and gradient norms that one process gets with them.

`tests/golden/<model>.txt` holds the latter, written by plain torch without ranks or wrappers. Renew the files with
`python -m tests.parallel.golden` and say why in the commit.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional
from typing_extensions import override

from tests.parallel.expert.dense_experts import DenseExperts
from torsh_distributed.parallel.expert.layer import auxiliary_loss
from torsh_distributed.plan.sections.expert import ExpertConfig
from torsh_distributed.train.demos.gpt import Block, CharGPT, next_character_loss
from torsh_distributed.train.demos.moe import with_experts

FOLDER = Path(__file__).parents[1] / "golden"
STEPS = 20
FEW_STEPS = 6
"""How many of them the short forms of long tests train; an update or a gradient that is wrong shows in the third."""
BATCH = 8
CLIP = 0.5
Batch = tuple[Tensor, Tensor]


def gpt() -> nn.Module:
    torch.manual_seed(11)
    return CharGPT(29, width=24, num_layers=2, num_heads=2)


def mlp() -> nn.Module:
    torch.manual_seed(12)
    return nn.Sequential(nn.Linear(6, 32), nn.Tanh(), nn.Linear(32, 32), nn.Tanh(), nn.Linear(32, 3))


EXPERTS = ExpertConfig(num_experts=4, overflow="none", load_balance_loss_coeff=0.5, router_z_loss_coeff=0.05)


def moe(config: ExpertConfig = EXPERTS) -> nn.Module:
    model = gpt()
    assert isinstance(model, CharGPT)
    return with_experts(model, config)


def moe_written_out() -> nn.Module:
    """The same model and weights, with layers in which every expert computes every token."""
    model = moe()
    for block in model.get_submodule("blocks").children():
        assert isinstance(block, Block)
        block.feed_forward = DenseExperts(block.feed_forward, EXPERTS)  # type: ignore[assignment]  # was a Sequential
    return model


class Odd(nn.Module):
    """What real models have: tied, frozen, unused and scalar parameters, fewer rows than ranks, buffers."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(13, 10)
        self.layers = nn.ModuleList(nn.Linear(10, 10) for _ in range(3))
        self.layers[1].requires_grad_(False)
        self.narrow = nn.Linear(10, 1)
        self.widen = nn.Linear(1, 10, bias=False)
        self.unused = nn.Linear(10, 10)
        self.gain = nn.Parameter(torch.tensor(0.7))
        self.head = nn.Linear(10, 13, bias=False)
        self.head.weight = self.table.weight
        self.register_buffer("offset", torch.linspace(-1, 1, 10))

    @override
    def forward(self, ids: Tensor) -> Tensor:
        hidden = self.table(ids) + self.offset
        for layer in self.layers:
            hidden = hidden + torch.tanh(layer(hidden))
        hidden = hidden + self.gain * self.widen(torch.tanh(self.narrow(hidden)))
        logits: Tensor = self.head(hidden)
        return logits


def odd() -> nn.Module:
    torch.manual_seed(13)
    return Odd()


def _text(vocabulary: int) -> list[Batch]:
    generator = torch.Generator().manual_seed(21)
    found = []
    for _ in range(STEPS):
        start = torch.randint(vocabulary, (BATCH, 1), generator=generator)
        ids = (start + 3 * torch.arange(13)) % vocabulary
        found.append((ids[:, :-1], ids[:, 1:]))
    return found


def _points() -> list[Batch]:
    generator = torch.Generator().manual_seed(22)
    points = [torch.randn(BATCH, 6, generator=generator) for _ in range(STEPS)]
    return [(one, one[:, :3].argmax(dim=1)) for one in points]


MODELS: dict[str, tuple[Callable[[], nn.Module], list[Batch], Callable[[Tensor, Tensor], Tensor]]] = {
    "gpt": (gpt, _text(29), next_character_loss),
    "mlp": (mlp, _points(), functional.cross_entropy),
    "odd": (odd, _text(13), next_character_loss),
    "moe": (moe, _text(29), next_character_loss),
    "moe_microbatches": (moe, _text(29), next_character_loss),
}
MICROBATCHES = {"moe_microbatches": 2}
"""Into how many a batch is cut, where that matters: the balance loss is a product of means, so of each microbatch."""


def loss_of(name: str, model: nn.Module) -> Callable[[Tensor, Tensor], Tensor]:
    """The loss of a parallel run, with the auxiliary ones of a model with experts."""
    loss_fn = MODELS[name][2]
    return lambda outputs, targets: loss_fn(outputs, targets) + auxiliary_loss(model)


def make_optimizer(model: nn.Module) -> torch.optim.Optimizer:
    """Two groups, as is usual: weight decay for matrices only."""
    params = [param for param in model.parameters() if param.requires_grad]
    matrices, others = [p for p in params if p.dim() > 1], [p for p in params if p.dim() <= 1]
    return torch.optim.AdamW(
        [{"params": matrices, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0, "lr": 2e-3}], lr=5e-3
    )


def train_alone(name: str) -> list[tuple[float, float]]:
    """Loss and gradient norm of every step, in one process."""
    make, batches, loss_fn = MODELS[name]
    model = moe_written_out() if make is moe else make()
    optimizer = make_optimizer(model)
    num_pieces = MICROBATCHES.get(name, 1)
    found = []
    for inputs, targets in batches:
        optimizer.zero_grad()
        total = 0.0
        for piece, wanted in zip(inputs.chunk(num_pieces), targets.chunk(num_pieces), strict=True):
            loss = loss_fn(model(piece), wanted)
            for layer in model.modules():
                if isinstance(layer, DenseExperts):
                    loss = loss + layer.auxiliary_loss
            loss = loss / num_pieces
            loss.backward()  # type: ignore[no-untyped-call]  # untyped in torch
            total += loss.item()
        norm = nn.utils.clip_grad_norm_([p for p in model.parameters() if p.grad is not None], CLIP)
        optimizer.step()
        found.append((total, norm.item()))
    return found


def golden(name: str) -> list[tuple[float, float]]:
    """What the file says."""
    lines = (FOLDER / f"{name}.txt").read_text().splitlines()
    return [(float(loss), float(norm)) for _, loss, norm in (line.split() for line in lines if line[0] != "#")]


def main() -> None:
    """Write all files."""
    FOLDER.mkdir(exist_ok=True)
    for name in MODELS:
        lines = ["# step loss gradient_norm: one process, plain torch; python -m tests.parallel.golden"]
        lines += [f"{step} {loss:.6f} {norm:.6f}" for step, (loss, norm) in enumerate(train_alone(name), start=1)]
        (FOLDER / f"{name}.txt").write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
