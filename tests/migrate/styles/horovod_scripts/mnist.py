"""The first script of Horovod's examples: a sampler, broadcasts, a distributed optimizer and averaged metrics."""

import argparse

import horovod.torch as hvd
import made_up
import torch
import torch.nn.functional as F  # noqa: N812 - as such scripts write it
from torch.utils.data import DataLoader
from torch.utils.data.distributed import DistributedSampler

parser = argparse.ArgumentParser()
parser.add_argument("--batch-size", type=int, default=8)
parser.add_argument("--epochs", type=int, default=2)
parser.add_argument("--lr", type=float, default=0.02)
parser.add_argument("--momentum", type=float, default=0.5)
args = parser.parse_args()

hvd.init()
torch.set_num_threads(1)
train_dataset, test_dataset = made_up.digits(64), made_up.digits(32, seed=5)
train_sampler = DistributedSampler(train_dataset, num_replicas=hvd.size(), rank=hvd.rank())
train_loader = DataLoader(train_dataset, batch_size=args.batch_size, sampler=train_sampler)
test_sampler = DistributedSampler(test_dataset, num_replicas=hvd.size(), rank=hvd.rank(), shuffle=False)
test_loader = DataLoader(test_dataset, batch_size=args.batch_size, sampler=test_sampler)

model = made_up.convnet(seed=hvd.rank())  # rank 0's values are broadcast
optimizer = torch.optim.SGD(model.parameters(), lr=args.lr * hvd.size(), momentum=args.momentum)
hvd.broadcast_parameters(model.state_dict(), root_rank=0)
hvd.broadcast_optimizer_state(optimizer, root_rank=0)
optimizer = hvd.DistributedOptimizer(
    optimizer, named_parameters=model.named_parameters(), compression=hvd.Compression.none, op=hvd.Average
)


def metric_average(value, name):
    return hvd.allreduce(torch.tensor(value), name=name).item()


def train(epoch):
    model.train()
    train_sampler.set_epoch(epoch)
    for data, target in train_loader:
        optimizer.zero_grad()
        loss = F.cross_entropy(model(data), target)
        loss.backward()
        optimizer.step()


def test():
    model.eval()
    test_loss, test_accuracy = 0.0, 0.0
    with torch.no_grad():
        for data, target in test_loader:
            output = model(data)
            test_loss += F.cross_entropy(output, target, reduction="sum").item()
            test_accuracy += (output.argmax(1) == target).float().sum().item()
    return (
        metric_average(test_loss / len(test_sampler), "avg_loss"),
        metric_average(test_accuracy / len(test_sampler), "avg_accuracy"),
    )


losses = []
for epoch in range(args.epochs):
    train(epoch)
    loss, accuracy = test()
    losses.append(loss)
if hvd.rank() == 0:
    made_up.report("mnist", losses)
hvd.shutdown()
