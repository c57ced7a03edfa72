"""Scripts as the libraries' own examples are written run unchanged on two ranks, with the losses of one process.

All of a library run one after the other in one job: starting interpreters takes most of the time.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterable, Sequence
from itertools import chain
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.optim import Optimizer
from torch.utils.data import Dataset, Subset, TensorDataset
from torch.utils.data.distributed import DistributedSampler

from tests.migrate.styles.shared import made_up

pytestmark = [pytest.mark.matrix, pytest.mark.ranks]

STYLES = Path(__file__).parent / "styles"
IN_TURN = """
import runpy, sys
given = [word for word in sys.argv if word.startswith("--local_rank")]
for script in {scripts!r}:
    sys.argv = [script, *given]
    runpy.run_path(script, run_name="__main__")
"""
Batch = tuple[Tensor, Tensor]
LossFn = Callable[[Tensor, Tensor], Tensor]


def reported(library: str, folder: Path, names: Iterable[str]) -> dict[str, list[float]]:
    """The losses that the library's scripts print on two ranks."""
    script = folder / "in_turn.py"
    script.write_text(IN_TURN.format(scripts=[str(STYLES / f"{library}_scripts" / f"{name}.py") for name in names]))
    torsh = [sys.executable, "-m", "torsh_distributed.cli.entry_point", "run", "--as", library]
    here = {**os.environ, "PYTHONPATH": str(STYLES / "shared")}
    words = [*torsh, "--nproc-per-node", "2", str(script)]
    done = subprocess.run(words, capture_output=True, text=True, timeout=110, env=here)
    assert done.returncode == 0, done.stdout + done.stderr
    return {name: json.loads(losses) for name, losses in re.findall(r"losses of (\w+): (.*)", done.stdout)}


def in_steps(dataset: TensorDataset, batch: int, *, passes: int = 1, epoch: int | None = None) -> list[list[Batch]]:
    """For each update what both ranks see in it; without an epoch nothing is shuffled."""
    parts: list[list[Batch]] = []
    for rank in range(2):
        sampler = DistributedSampler(dataset, num_replicas=2, rank=rank, shuffle=epoch is not None)
        sampler.set_epoch(epoch or 0)
        rows = list(sampler)
        parts.append([taken(dataset, rows[first : first + batch]) for first in range(0, len(rows), batch)])
    both = [[one, other] for one, other in zip(*parts, strict=True)]
    return [[*chain(*both[first : first + passes])] for first in range(0, len(both), passes)]


def taken(dataset: Dataset[tuple[Tensor, ...]], rows: Sequence[int]) -> Batch:
    inputs, targets = zip(*Subset(dataset, rows), strict=True)
    return torch.stack(inputs), torch.stack(targets)


def consecutive(dataset: TensorDataset, batch: int, count: int) -> list[list[Batch]]:
    """For each update the batches of the ranks, which follow each other in the data."""
    inputs, targets = dataset.tensors
    rows = [slice(first, first + batch) for first in range(0, 2 * batch * count, batch)]
    pieces = [(inputs[one], targets[one]) for one in rows]
    return [pieces[first : first + 2] for first in range(0, len(pieces), 2)]


def plain(
    model: nn.Module,
    optimizer: Optimizer,
    steps: Sequence[Sequence[Batch]],
    loss_fn: LossFn = functional.cross_entropy,
    *,
    clip: float | None = None,
    after: Callable[[], object] = lambda: None,
    skips: Sequence[int] = (),
) -> list[float]:
    """Training in one process; the mean losses of both ranks, pass by pass."""
    losses = []
    for number, parts in enumerate(steps):
        found = torch.stack([loss_fn(model(inputs), targets) for inputs, targets in parts])
        losses += found.detach().view(-1, 2).mean(1).tolist()
        optimizer.zero_grad()
        found.mean().backward()
        if clip is not None:
            nn.utils.clip_grad_norm_(model.parameters(), clip)
        if number not in skips:
            optimizer.step()
            after()
    return losses


def mnist() -> list[float]:
    model, test = made_up.convnet(), made_up.digits(32, seed=5).tensors
    optimizer = torch.optim.SGD(model.parameters(), lr=0.04, momentum=0.5)
    losses = []
    for epoch in range(2):
        plain(model, optimizer, in_steps(made_up.digits(64), 8, epoch=epoch))
        with torch.no_grad():
            losses.append(functional.cross_entropy(model(test[0]), test[1]).item())
    return losses


def synthetic() -> list[float]:
    model = made_up.convnet()
    both = [made_up.digits(8, seed=rank).tensors for rank in range(2)]
    return plain(model, torch.optim.SGD(model.parameters(), lr=0.02), [both] * 7)


def language_model() -> list[float]:
    model = made_up.reader()
    steps = in_steps(made_up.sentences(48), 4)
    return plain(model, torch.optim.Adam(model.parameters(), lr=0.02), steps, made_up.token_loss, clip=0.25)


def skip_gram() -> list[float]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(made_up.VOCABULARY, 8), nn.Linear(8, made_up.VOCABULARY))
    both = [made_up.sentences(8, seed=rank).tensors for rank in range(2)]
    return plain(model, torch.optim.SGD(model.parameters(), lr=0.5), [both] * 5, made_up.token_loss)


def uneven() -> list[float]:
    model = made_up.convnet()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    losses = []
    for step in range(4):
        rows = slice(8 * step, 8 * step + 8)
        parts = [[value[rows] for value in made_up.digits(32 - 8 * rank, seed=rank).tensors] for rank in range(2)]
        found = [functional.cross_entropy(model(inputs), labels) for inputs, labels in parts if len(labels)]
        optimizer.zero_grad()
        (torch.stack(found).sum() / 2).backward()
        optimizer.step()
        losses.append(found[0].item())
    return losses


def resumed() -> list[float]:
    model = made_up.convnet()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    return plain(model, optimizer, in_steps(made_up.digits(64), 8, passes=2) * 2)


def cifar() -> list[float]:
    model = made_up.convnet()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, betas=(0.8, 0.999), weight_decay=3e-7)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(max(step - 1, 0) / 4, 1.0))
    steps = in_steps(made_up.digits(64), 8, epoch=0)
    return plain(model, optimizer, steps * 2, clip=1.0, after=schedule.step)


def squad() -> list[float]:
    model = made_up.encoder()
    small = [param for name, param in model.named_parameters() if name.endswith("bias") or "norm" in name]
    large = [param for param in model.parameters() if all(param is not one for one in small)]
    groups = [{"params": large, "weight_decay": 0.01}, {"params": small, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=5e-3)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0 / (1 + step))
    steps = in_steps(made_up.sentences(64), 4, passes=2)
    return plain(model, optimizer, steps, made_up.token_loss, clip=0.5, after=schedule.step)


def gan() -> list[float]:
    torch.manual_seed(0)
    maker = nn.Sequential(nn.Linear(4, 16), nn.ReLU(), nn.Linear(16, 64))
    critic = nn.Sequential(nn.Linear(64, 16), nn.LeakyReLU(0.2), nn.Linear(16, 1))
    of_maker, of_critic = (torch.optim.Adam(one.parameters(), lr=2e-3, betas=(0.5, 0.999)) for one in (maker, critic))
    noises = [torch.Generator().manual_seed(20 + rank) for rank in range(2)]
    real = [made_up.digits(8, seed=rank).tensors[0].flatten(1) for rank in range(2)]
    loss_fn, ones, zeros = nn.BCEWithLogitsLoss(), torch.ones(8, 1), torch.zeros(8, 1)
    losses = []
    for _ in range(5):
        fakes = [maker(torch.randn(8, 4, generator=noise)) for noise in noises]
        found = [
            loss_fn(critic(one), ones) + loss_fn(critic(fake.detach()), zeros)
            for one, fake in zip(real, fakes, strict=True)
        ]
        of_critic.zero_grad()
        torch.stack(found).mean().backward()
        of_critic.step()
        judged = torch.stack([loss_fn(critic(fake), ones) for fake in fakes]).mean()
        of_maker.zero_grad()
        judged.backward()
        of_maker.step()
        losses += [torch.stack(found).mean().item(), judged.item()]
    return losses


def alexnet_pipeline() -> list[float]:
    model = made_up.convnet()
    images, labels = made_up.digits(64).tensors
    rows = [slice(16 * (step % 4), 16 * (step % 4) + 16) for step in range(6)]
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    return plain(model, optimizer, [[(images[one], labels[one])] * 2 for one in rows])


def gpt_pipeline() -> list[float]:
    torch.manual_seed(1)
    embedding = nn.Embedding(made_up.VOCABULARY, made_up.WIDTH)
    layers = nn.ModuleList()
    for index in range(4):
        torch.manual_seed(2 + index)
        layers.append(nn.TransformerEncoderLayer(made_up.WIDTH, 2, 32, 0.0, batch_first=True))
    causal = torch.ones(made_up.LENGTH, made_up.LENGTH, dtype=torch.bool).triu(1)

    class Whole(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embedding, self.layers = embedding, layers

        def forward(self, ids: Tensor) -> Tensor:
            hidden = self.embedding(ids)
            for layer in self.layers:
                hidden = layer(hidden, src_mask=causal)
            return functional.linear(hidden, self.embedding.weight)

    model = Whole()
    steps = consecutive(made_up.sentences(40), 4, 5)
    return plain(model, torch.optim.SGD(model.parameters(), lr=0.1), steps, made_up.token_loss)


def hello() -> list[float]:
    model = made_up.encoder()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.0)
    return plain(model, optimizer, consecutive(made_up.sentences(64), 4, 6), made_up.token_loss, clip=1.0)


def oss() -> list[float]:
    model = made_up.convnet()
    return plain(model, torch.optim.Adam(model.parameters(), lr=0.01), in_steps(made_up.digits(64), 8), clip=0.5)


def sharded() -> list[float]:
    model = made_up.convnet()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    return plain(model, optimizer, in_steps(made_up.digits(64), 8, passes=2))


def resumed_oss() -> list[float]:
    model = made_up.reader()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.02)
    return plain(model, optimizer, consecutive(made_up.sentences(64), 4, 6), made_up.token_loss)


def fsdp() -> list[float]:
    model = made_up.convnet()
    return plain(model, torch.optim.SGD(model.parameters(), lr=0.1), in_steps(made_up.digits(64), 8), clip=1.0)


def wrapped_layers() -> list[float]:
    model = made_up.encoder()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, weight_decay=0.0)
    pairs = consecutive(made_up.sentences(64), 4, 8)
    steps = [[*first, *second] for first, second in zip(pairs[::2], pairs[1::2], strict=True)]
    return plain(model, optimizer, steps, made_up.token_loss)


def tensor_parallel() -> list[float]:
    torch.manual_seed(0)
    layers = nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, made_up.NUM_CLASSES)
    return whole_batches(nn.Sequential(nn.Flatten(), *layers))


def pipe() -> list[float]:
    return whole_batches(made_up.convnet())


def whole_batches(model: nn.Module) -> list[float]:
    images, labels = made_up.digits(64).tensors
    steps = [[(images[first : first + 16], labels[first : first + 16])] * 2 for first in range(0, 64, 16)]
    return plain(model, torch.optim.SGD(model.parameters(), lr=0.1), steps)


def scaled() -> list[float]:
    model = made_up.reader()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.02, weight_decay=0.0)
    return plain(model, optimizer, consecutive(made_up.sentences(64), 4, 5), made_up.token_loss, skips=[2])


def auto_wrapped() -> list[float]:
    model = made_up.encoder()
    steps = consecutive(made_up.sentences(64), 4, 5)
    return plain(model, torch.optim.SGD(model.parameters(), lr=0.2), steps, made_up.token_loss)


SCRIPTS: dict[str, tuple[Callable[[], list[float]], ...]] = {
    "deepspeed": (cifar, squad, gan, alexnet_pipeline, gpt_pipeline, hello),
    "fairscale": (
        oss,
        sharded,
        resumed_oss,
        fsdp,
        wrapped_layers,
        auto_wrapped,
        tensor_parallel,
        pipe,
        scaled,
    ),
    "horovod": (mnist, synthetic, language_model, skip_gram, uneven, resumed),
}


def test_every_script_is_run() -> None:
    for library, references in SCRIPTS.items():
        assert {one.__name__ for one in references} == {
            path.stem for path in (STYLES / f"{library}_scripts").glob("[!_]*.py")
        }


@pytest.mark.parametrize("library", SCRIPTS)
def test_scripts_have_the_losses_of_one_process(tmp_path: Path, library: str) -> None:
    found = reported(library, tmp_path, [one.__name__ for one in SCRIPTS[library]])
    for reference in SCRIPTS[library]:
        assert found[reference.__name__] == pytest.approx(reference(), rel=1e-4, abs=1e-6), reference.__name__
