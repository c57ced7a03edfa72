"""Training in the style of ImageNet scripts on Horovod: warm-up, several batches per reduction, resuming."""

import argparse
import math
from pathlib import Path

import horovod.torch as hvd
import torch
import torch.nn.functional as F  # noqa: N812 - as such scripts write it
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler

parser = argparse.ArgumentParser()
parser.add_argument("--checkpoint-format", required=True)
parser.add_argument("--fp16-allreduce", action="store_true", default=False)
parser.add_argument("--batches-per-allreduce", type=int, default=2)
parser.add_argument("--use-adasum", action="store_true", default=False)
parser.add_argument("--gradient-predivide-factor", type=float, default=1.0)
parser.add_argument("--batch-size", type=int, default=16)
parser.add_argument("--epochs", type=int, default=4)
parser.add_argument("--base-lr", type=float, default=0.0125)
parser.add_argument("--warmup-epochs", type=float, default=2)
parser.add_argument("--momentum", type=float, default=0.9)
parser.add_argument("--wd", type=float, default=0.00005)
parser.add_argument("--seed", type=int, default=42)
args = parser.parse_args()

allreduce_batch_size = args.batch_size * args.batches_per_allreduce
hvd.init()
torch.manual_seed(args.seed)
torch.set_num_threads(1)

resume_from_epoch = 0
for try_epoch in range(args.epochs, 0, -1):
    if Path(args.checkpoint_format.format(epoch=try_epoch)).exists():
        resume_from_epoch = try_epoch
        break
resume_from_epoch = hvd.broadcast(torch.tensor(resume_from_epoch), root_rank=0, name="resume_from_epoch").item()
verbose = hvd.rank() == 0

patterns = torch.randn(10, 1, 12, 12, generator=torch.Generator().manual_seed(0))


def make(count, seed):
    generator = torch.Generator().manual_seed(seed)
    labels = torch.randint(0, 10, (count,), generator=generator)
    return TensorDataset(patterns[labels] + 0.5 * torch.randn(count, 1, 12, 12, generator=generator), labels)


train_dataset, val_dataset = make(1024, 1), make(256, 2)
train_sampler = DistributedSampler(train_dataset, num_replicas=hvd.size(), rank=hvd.rank())
train_loader = DataLoader(train_dataset, batch_size=allreduce_batch_size, sampler=train_sampler)
val_sampler = DistributedSampler(val_dataset, num_replicas=hvd.size(), rank=hvd.rank())
val_loader = DataLoader(val_dataset, batch_size=64, sampler=val_sampler)

model = nn.Sequential(
    nn.Conv2d(1, 8, 3, stride=2, padding=1), nn.BatchNorm2d(8), nn.ReLU(), nn.Flatten(), nn.Linear(288, 10)
)
lr_scaler = args.batches_per_allreduce * hvd.size() if not args.use_adasum else 1
optimizer = torch.optim.SGD(
    model.parameters(), lr=args.base_lr * lr_scaler, momentum=args.momentum, weight_decay=args.wd
)
compression = hvd.Compression.fp16 if args.fp16_allreduce else hvd.Compression.none
optimizer = hvd.DistributedOptimizer(
    optimizer,
    named_parameters=model.named_parameters(),
    compression=compression,
    backward_passes_per_step=args.batches_per_allreduce,
    op=hvd.Adasum if args.use_adasum else hvd.Average,
    gradient_predivide_factor=args.gradient_predivide_factor,
)
if resume_from_epoch > 0 and hvd.rank() == 0:
    checkpoint = torch.load(args.checkpoint_format.format(epoch=resume_from_epoch), weights_only=True)
    model.load_state_dict(checkpoint["model"])
    optimizer.load_state_dict(checkpoint["optimizer"])
hvd.broadcast_parameters(model.state_dict(), root_rank=0)
hvd.broadcast_optimizer_state(optimizer, root_rank=0)


class Metric:
    def __init__(self, name):
        self.name, self.sum, self.n = name, torch.tensor(0.0), torch.tensor(0.0)

    def update(self, value):
        self.sum += hvd.allreduce(value.detach().cpu(), name=self.name)
        self.n += 1

    @property
    def avg(self):
        return self.sum / self.n


def adjust_learning_rate(epoch, batch_idx):
    if epoch < args.warmup_epochs:
        epoch += float(batch_idx + 1) / len(train_loader)
        lr_adj = 1.0 / hvd.size() * (epoch * (hvd.size() - 1) / args.warmup_epochs + 1)
    else:
        lr_adj = 1.0 if epoch < 3 else 1e-1
    for param_group in optimizer.param_groups:
        param_group["lr"] = args.base_lr * hvd.size() * args.batches_per_allreduce * lr_adj


def accuracy(output, target):
    return output.max(1, keepdim=True)[1].eq(target.view_as(output.max(1, keepdim=True)[1])).float().mean()


for epoch in range(resume_from_epoch, args.epochs):
    model.train()
    train_sampler.set_epoch(epoch)
    train_loss, train_accuracy = Metric("train_loss"), Metric("train_accuracy")
    for batch_idx, (data, target) in enumerate(train_loader):
        adjust_learning_rate(epoch, batch_idx)
        optimizer.zero_grad()
        for i in range(0, len(data), args.batch_size):
            data_batch, target_batch = data[i : i + args.batch_size], target[i : i + args.batch_size]
            output = model(data_batch)
            train_accuracy.update(accuracy(output, target_batch))
            loss = F.cross_entropy(output, target_batch)
            train_loss.update(loss)
            loss.div_(math.ceil(float(len(data)) / args.batch_size))
            loss.backward()
        optimizer.step()
    model.eval()
    val_loss, val_accuracy = Metric("val_loss"), Metric("val_accuracy")
    with torch.no_grad():
        for data, target in val_loader:
            output = model(data)
            val_loss.update(F.cross_entropy(output, target))
            val_accuracy.update(accuracy(output, target))
    if verbose:
        print(
            f"epoch {epoch + 1}: loss {train_loss.avg.item():.3f}, accuracy {100 * val_accuracy.avg.item():.1f}%"
            f" from {resume_from_epoch}",
            flush=True,
        )
        state = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
        torch.save(state, args.checkpoint_format.format(epoch=epoch + 1))
