"""A FairScale script as FairScale's own examples are written: nothing in it knows of torsh_distributed.

torsh run --as fairscale --nproc-per-node 2 examples/migrate/fairscale_resnet.py
"""

import argparse

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F  # noqa: N812 - as FairScale's examples write it
from fairscale.nn import checkpoint_wrapper
from fairscale.nn.data_parallel import ShardedDataParallel as ShardedDDP
from fairscale.optim.grad_scaler import ShardedGradScaler
from fairscale.optim.oss import OSS
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler


def parse_args() -> argparse.Namespace:
    """The arguments of FairScale's OSS example, as far as a CPU can use them."""
    parser = argparse.ArgumentParser(description="Drawn shapes with OSS and ShardedDDP")
    parser.add_argument("--batch_size", type=int, default=32)
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--lr", type=float, default=2e-3)
    parser.add_argument("--amp", action="store_true", help="compute in bfloat16 and scale the loss")
    parser.add_argument("--checkpoint_activations", action="store_true")
    parser.add_argument("--save", default=None, help="write model and optimizer to this file in the end")
    return parser.parse_args()


class BasicBlock(nn.Module):
    """Two convolutions beside a shortcut."""

    def __init__(self, planes_in: int, planes: int, stride: int = 1) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(planes_in, planes, 3, stride=stride, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(planes)
        self.conv2 = nn.Conv2d(planes, planes, 3, padding=1, bias=False)
        self.bn2 = nn.BatchNorm2d(planes)
        self.shortcut = nn.Sequential()
        if stride != 1 or planes_in != planes:
            self.shortcut = nn.Sequential(
                nn.Conv2d(planes_in, planes, 1, stride=stride, bias=False), nn.BatchNorm2d(planes)
            )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Feature maps of the block."""
        out = F.relu(self.bn1(self.conv1(x)))
        return F.relu(self.bn2(self.conv2(out)) + self.shortcut(x))


class ResNet(nn.Module):
    """A ResNet with three blocks for images of 14 × 14."""

    def __init__(self, num_classes: int = 10) -> None:
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(1, 8, 3, padding=1, bias=False), nn.BatchNorm2d(8), nn.ReLU())
        self.layer1 = BasicBlock(8, 8)
        self.layer2 = BasicBlock(8, 16, stride=2)
        self.layer3 = BasicBlock(16, 32, stride=2)
        self.fc = nn.Linear(32, num_classes)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Logits."""
        x = self.layer3(self.layer2(self.layer1(self.stem(x))))
        return self.fc(x.mean(dim=(2, 3)))


def shapes(num_samples: int, seed: int) -> TensorDataset:
    """Images of ten shapes, blurred by noise: small, and learned in seconds."""
    patterns = torch.randn(10, 1, 14, 14, generator=torch.Generator().manual_seed(0))
    generator = torch.Generator().manual_seed(seed)
    labels = torch.randint(0, 10, (num_samples,), generator=generator)
    images = patterns[labels] + 0.5 * torch.randn(num_samples, 1, 14, 14, generator=generator)
    return TensorDataset(images, labels)


def evaluate(model: nn.Module, dataset: TensorDataset) -> float:
    """The share of images that are recognised; the same on every rank."""
    model.eval()
    images, labels = dataset.tensors
    with torch.no_grad():
        correct = model(images).argmax(1).eq(labels).float().mean()
    model.train()
    return float(correct)


def main() -> None:
    """Train, and test after every epoch."""
    args = parse_args()
    dist.init_process_group(backend="gloo")
    rank, world_size = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(rank)  # ShardedDDP makes the replicas equal
    torch.set_num_threads(1)

    model: nn.Module = ResNet()
    if args.checkpoint_activations:
        model.layer2 = checkpoint_wrapper(model.layer2)

    # Wrap the optimizer's class in OSS, then the model, which needs to know who owns what.
    optimizer = OSS(params=model.parameters(), optim=torch.optim.AdamW, lr=args.lr, weight_decay=1e-2)
    model = ShardedDDP(model, optimizer)
    scaler = ShardedGradScaler(enabled=args.amp)
    dataset = shapes(1280, seed=1)
    sampler = DistributedSampler(dataset, num_replicas=world_size, rank=rank)
    loader = DataLoader(dataset, batch_size=args.batch_size, sampler=sampler)
    scheduler = torch.optim.lr_scheduler.OneCycleLR(
        optimizer, max_lr=args.lr, steps_per_epoch=len(loader), epochs=args.epochs
    )

    for epoch in range(args.epochs):
        sampler.set_epoch(epoch)
        total = torch.zeros(())
        for images, labels in loader:
            model.zero_grad()
            with torch.autocast("cpu", dtype=torch.bfloat16, enabled=args.amp):
                loss = F.cross_entropy(model(images), labels)
            scaler.scale(loss).backward()
            scaler.unscale_(optimizer)
            optimizer.clip_grad_norm(1.0)
            scaler.step(optimizer)
            scaler.update()
            scheduler.step()
            total += loss.detach()
        dist.all_reduce(total)
        accuracy = evaluate(model, shapes(500, seed=2))
        if rank == 0:
            mean = total.item() / (len(loader) * world_size)
            print(f"Epoch {epoch}: loss {mean:.4f}, accuracy {100 * accuracy:.1f}%")

    optimizer.consolidate_state_dict(recipient_rank=0)
    if rank == 0 and args.save:
        torch.save({"model": model.module.state_dict(), "optimizer": optimizer.state_dict()}, args.save)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
