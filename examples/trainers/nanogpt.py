"""A nanoGPT-style script: one file, a loop with gradient accumulation, bytes of this file as the text.

torsh run --nproc-per-node 2 examples/trainers/nanogpt.py
torchrun --nproc-per-node 2 examples/trainers/nanogpt.py
"""

import math
import os
from contextlib import nullcontext
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, scaled_dot_product_attention
from torch.nn.parallel import DistributedDataParallel as DDP  # noqa: N817 (as such scripts have it)

import torsh_distributed as td

batch_size, block_size, n_layer, n_head, n_embd = 4, 64, 2, 4, 64
gradient_accumulation_steps, max_iters, warmup_iters, learning_rate = 4, 10, 2, 3e-3

td.init()
ddp_rank, ddp_world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
assert gradient_accumulation_steps % ddp_world_size == 0
gradient_accumulation_steps //= ddp_world_size
device = td.device()
torch.manual_seed(1337)


class Block(nn.Module):
    """Attention and a feed-forward layer, each after a norm."""

    def __init__(self) -> None:
        super().__init__()
        self.ln_1, self.ln_2 = nn.LayerNorm(n_embd), nn.LayerNorm(n_embd)
        self.c_attn, self.c_proj = nn.Linear(n_embd, 3 * n_embd), nn.Linear(n_embd, n_embd)
        self.mlp = nn.Sequential(nn.Linear(n_embd, 4 * n_embd), nn.GELU(), nn.Linear(4 * n_embd, n_embd))

    def forward(self, x: Tensor) -> Tensor:
        """(batch, time, channels), the same shape out."""
        heads = [one.unflatten(2, (n_head, -1)).transpose(1, 2) for one in self.c_attn(self.ln_1(x)).split(n_embd, 2)]
        x = x + self.c_proj(scaled_dot_product_attention(*heads, is_causal=True).transpose(1, 2).flatten(2))
        return x + self.mlp(self.ln_2(x))


class GPT(nn.Module):
    """Token and position embeddings, blocks, and a head that shares the token embedding."""

    def __init__(self) -> None:
        super().__init__()
        self.wte, self.wpe = nn.Embedding(256, n_embd), nn.Embedding(block_size, n_embd)
        self.h = nn.Sequential(*(Block() for _ in range(n_layer)))
        self.ln_f, self.lm_head = nn.LayerNorm(n_embd), nn.Linear(n_embd, 256, bias=False)
        self.lm_head.weight = self.wte.weight

    def forward(self, idx: Tensor, targets: Tensor) -> Tensor:
        """The mean loss of the next byte."""
        x = self.h(self.wte(idx) + self.wpe(torch.arange(idx.shape[1], device=idx.device)))
        return cross_entropy(self.lm_head(self.ln_f(x)).flatten(0, 1), targets.flatten())


text = torch.frombuffer(bytearray(Path(__file__).read_bytes()), dtype=torch.uint8).long()
model = DDP(GPT().to(device))
optimizer = torch.optim.AdamW(model.parameters(), lr=learning_rate, betas=(0.9, 0.95))
torch.manual_seed(1337 + ddp_rank)


def get_batch() -> tuple[Tensor, Tensor]:
    """Random pieces of the text, and the same pieces one byte later."""
    starts = torch.randint(len(text) - block_size - 1, (batch_size,))
    pieces = torch.stack([text[start : start + block_size + 1] for start in starts]).to(device)
    return pieces[:, :-1], pieces[:, 1:]


for iteration in range(max_iters):
    rate = (
        learning_rate * min(1.0, (iteration + 1) / warmup_iters) * 0.5 * (1 + math.cos(math.pi * iteration / max_iters))
    )
    for group in optimizer.param_groups:
        group["lr"] = rate
    for micro_step in range(gradient_accumulation_steps):
        is_last = micro_step == gradient_accumulation_steps - 1
        with nullcontext() if is_last else model.no_sync():
            loss = model(*get_batch()) / gradient_accumulation_steps
            loss.backward()
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    mean = loss.detach() * gradient_accumulation_steps
    dist.all_reduce(mean, op=dist.ReduceOp.AVG)
    if ddp_rank == 0 and iteration % 5 == 4:
        print(f"iter {iteration + 1}: loss {mean.item():.4f} on {dist.get_backend()}")
dist.destroy_process_group()
