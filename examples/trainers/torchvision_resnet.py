"""torchvision's reference loop for classification, with a ResNet, random images and our backend.

torsh run --nproc-per-node 2 examples/trainers/torchvision_resnet.py
torchrun --nproc-per-node 2 examples/trainers/torchvision_resnet.py
"""

import torch
import torch.distributed as dist
import torchvision
from torch import nn
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

import torsh_distributed as td

td.init()
torch.manual_seed(0)
images, labels = torch.rand(32, 3, 32, 32), torch.arange(32) % 4
images += labels.view(-1, 1, 1, 1) / 4
data = TensorDataset(images, labels)
sampler = DistributedSampler(data)
loader = DataLoader(data, batch_size=8, sampler=sampler)

model = torchvision.models.resnet18(num_classes=4).to(td.device())
model = nn.parallel.DistributedDataParallel(model)
criterion = nn.CrossEntropyLoss(label_smoothing=0.1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.9, weight_decay=1e-4)
schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=2)

for epoch in range(2):
    sampler.set_epoch(epoch)
    model.train()
    for batch, targets in loader:
        loss = criterion(model(batch.to(td.device())), targets.to(td.device()))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    schedule.step()
    mean = loss.detach()
    dist.all_reduce(mean, op=dist.ReduceOp.AVG)
    if dist.get_rank() == 0:
        print(f"epoch {epoch}: loss {mean.item():.4f} on {dist.get_backend()}")
dist.destroy_process_group()
