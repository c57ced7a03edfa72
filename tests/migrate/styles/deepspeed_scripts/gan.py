"""An adversarial network on DeepSpeed: two engines, and two backwards before the critic's step."""

import deepspeed
import made_up
import torch
from torch import nn

torch.set_num_threads(1)
deepspeed.init_distributed()
rank = deepspeed.comm.get_rank()
torch.manual_seed(0)
net_g = nn.Sequential(nn.Linear(4, 16), nn.ReLU(), nn.Linear(16, 64))
net_d = nn.Sequential(nn.Linear(64, 16), nn.LeakyReLU(0.2), nn.Linear(16, 1))
config = {"train_micro_batch_size_per_gpu": 8, "zero_optimization": {"stage": 1}, "gradient_clipping": 0.0}
optimizer_d = torch.optim.Adam(net_d.parameters(), lr=2e-3, betas=(0.5, 0.999))
optimizer_g = torch.optim.Adam(net_g.parameters(), lr=2e-3, betas=(0.5, 0.999))
engine_d, optimizer_d, _, _ = deepspeed.initialize(model=net_d, optimizer=optimizer_d, config=config)
engine_g, optimizer_g, _, _ = deepspeed.initialize(model=net_g, optimizer=optimizer_g, config=config)
criterion = nn.BCEWithLogitsLoss()
noises = torch.Generator().manual_seed(20 + rank)
real = made_up.digits(8, seed=rank).tensors[0].flatten(1)
real_label, fake_label = torch.ones(8, 1), torch.zeros(8, 1)
losses = []
for _ in range(5):
    net_d.zero_grad()
    error_d_real = criterion(engine_d(real), real_label)
    engine_d.backward(error_d_real)
    fake = engine_g(torch.randn(8, 4, generator=noises))
    error_d_fake = criterion(engine_d(fake.detach()), fake_label)
    engine_d.backward(error_d_fake)
    engine_d.step()
    net_g.zero_grad()
    error_g = criterion(engine_d(fake), real_label)
    engine_g.backward(error_g)
    engine_d.zero_grad()
    engine_g.step()
    found = torch.stack([(error_d_real + error_d_fake).detach(), error_g.detach()])
    deepspeed.comm.all_reduce(found)
    losses += (found / deepspeed.comm.get_world_size()).tolist()
if rank == 0:
    made_up.report("gan", losses)
