"""Accelerate with a DeepSpeed config file: optimizer and schedule are the file's, dummies stand in for them."""

import argparse

import torch
from accelerate import Accelerator, PartialState
from accelerate.utils import DeepSpeedPlugin, DummyOptim, DummyScheduler
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

parser = argparse.ArgumentParser()
parser.add_argument("--config", required=True)
args = parser.parse_args()
PartialState(cpu=True)
accelerator = Accelerator(deepspeed_plugin=DeepSpeedPlugin(hf_ds_config=args.config))
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 1))
model.config = type("Config", (), {"hidden_size": 16})()
has_optimizer = "optimizer" in accelerator.state.deepspeed_plugin.deepspeed_config
has_scheduler = "scheduler" in accelerator.state.deepspeed_plugin.deepspeed_config
assert has_optimizer
assert has_scheduler
optimizer = DummyOptim(model.parameters(), lr=2e-2, weight_decay=0.0)
schedule = DummyScheduler(optimizer, total_num_steps=40, warmup_num_steps=4)
inputs = torch.randn(256, 8, generator=torch.Generator().manual_seed(0))
loader = DataLoader(TensorDataset(inputs, inputs.sum(1, keepdim=True)), batch_size=8)
model, optimizer, loader, schedule = accelerator.prepare(model, optimizer, loader, schedule)
losses = []
for _ in range(3):
    for x, y in loader:
        dtype = next(model.parameters()).dtype
        with accelerator.accumulate(model):
            loss = nn.functional.mse_loss(model(x.to(dtype)).float(), y)
            accelerator.backward(loss)
            if accelerator.sync_gradients:
                accelerator.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()
        losses.append(accelerator.gather(loss.detach()).mean().item())
assert losses[-1] < 0.5 * losses[0], losses
state = accelerator.get_state_dict(model)
accelerator.print(f"loss {losses[0]:.3f} to {losses[-1]:.3f}, {model.global_steps} steps")
if accelerator.is_main_process:
    assert state["0.weight"].shape == (16, 8)
accelerator.wait_for_everyone()
