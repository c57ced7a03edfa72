"""A GPT with a parser of Megatron's kind: checkpointed layers, a scheduler of its own, checkpoints by iteration."""

import argparse
from pathlib import Path

import deepspeed
import torch
import torch.nn.functional as F  # noqa: N812 - as such scripts write it
from torch import nn


def get_args():
    parser = argparse.ArgumentParser()
    group = parser.add_argument_group("network size")
    group.add_argument("--num-layers", type=int, default=2)
    group.add_argument("--hidden-size", type=int, default=32)
    group.add_argument("--num-attention-heads", type=int, default=2)
    group.add_argument("--seq-length", type=int, default=16)
    group = parser.add_argument_group("training")
    group.add_argument("--micro-batch-size", type=int, default=2)
    group.add_argument("--train-iters", type=int, default=6)
    group.add_argument("--lr", type=float, default=1e-2)
    group.add_argument("--clip-grad", type=float, default=1.0)
    group.add_argument("--checkpoint-activations", action="store_true")
    group.add_argument("--deepspeed-activation-checkpointing", action="store_true")
    group.add_argument("--save", default=None)
    group.add_argument("--load", default=None)
    group.add_argument("--local_rank", type=int, default=None)
    parser = deepspeed.add_config_arguments(parser)
    return parser.parse_args()


class Layer(nn.Module):
    def __init__(self, args):
        super().__init__()
        self.norm = nn.LayerNorm(args.hidden_size)
        self.attention = nn.MultiheadAttention(args.hidden_size, args.num_attention_heads, batch_first=True)
        self.mlp = nn.Sequential(
            nn.LayerNorm(args.hidden_size),
            nn.Linear(args.hidden_size, 2 * args.hidden_size),
            nn.GELU(),
            nn.Linear(2 * args.hidden_size, args.hidden_size),
        )

    def forward(self, hidden, mask):
        x = self.norm(hidden)
        hidden = hidden + self.attention(x, x, x, attn_mask=mask, need_weights=False)[0]
        return hidden + self.mlp(hidden)


class GPTModel(nn.Module):
    def __init__(self, args):
        super().__init__()
        self.args = args
        self.embed = nn.Embedding(64, args.hidden_size)
        self.layers = nn.ModuleList(Layer(args) for _ in range(args.num_layers))
        self.head = nn.Linear(args.hidden_size, 64, bias=False)

    def forward(self, tokens):
        hidden = self.embed(tokens)
        mask = torch.full((tokens.shape[1],) * 2, float("-inf"), dtype=hidden.dtype).triu(1)
        for layer in self.layers:
            if self.args.checkpoint_activations:
                checkpoint = deepspeed.checkpointing.checkpoint
                hidden = checkpoint(layer, hidden, mask)
            else:
                hidden = layer(hidden, mask)
        return self.head(hidden)


class AnnealingLR:
    """A scheduler that is no torch scheduler: `step`, `get_lr` and a state dict."""

    def __init__(self, optimizer, start_lr):
        self.optimizer, self.start_lr, self.num_iters = optimizer, start_lr, 0
        self.step(0)

    def get_lr(self):
        return self.start_lr / (1 + 0.1 * self.num_iters)

    def step(self, increment=1):
        self.num_iters += increment
        for group in self.optimizer.param_groups:
            group["lr"] = self.get_lr()

    def state_dict(self):
        return {"num_iters": self.num_iters}

    def load_state_dict(self, sd):
        self.num_iters = sd["num_iters"]


def get_params_for_weight_decay_optimization(model):
    decay, none = {"params": []}, {"params": [], "weight_decay": 0.0}
    for name, param in model.named_parameters():
        (none if name.endswith("bias") or "norm" in name else decay)["params"].append(param)
    return [decay, none]


def main():
    args = get_args()
    deepspeed.init_distributed(dist_backend="gloo")
    rank = torch.distributed.get_rank()
    torch.manual_seed(1234)
    deepspeed.runtime.utils.see_memory_usage("before the model is built", force=False)
    model = GPTModel(args)
    if args.deepspeed_activation_checkpointing:
        deepspeed.checkpointing.configure(
            None, deepspeed_config=args.deepspeed_config, num_checkpoints=args.num_layers, partition_activations=False
        )
        deepspeed.checkpointing.model_parallel_cuda_manual_seed(1234)
    optimizer = torch.optim.AdamW(get_params_for_weight_decay_optimization(model), lr=args.lr, betas=(0.9, 0.95))
    lr_scheduler = AnnealingLR(optimizer, args.lr)
    model, optimizer, _, lr_scheduler = deepspeed.initialize(
        model=model, optimizer=optimizer, args=args, lr_scheduler=lr_scheduler, mpu=None, dist_init_required=False
    )
    iteration = 0
    if args.load:
        path, state = model.load_checkpoint(args.load)
        assert path is not None
        iteration = state["iteration"]
        print(f"rank {rank} loaded iteration {iteration}", flush=True)
    generator = torch.Generator().manual_seed(10 * iteration + rank)
    loss = torch.zeros(())
    while iteration < args.train_iters:
        for _ in range(model.gradient_accumulation_steps()):
            tokens = torch.randint(0, 64, (args.micro_batch_size, args.seq_length), generator=generator) // 8
            logits = model(tokens)
            loss = F.cross_entropy(logits[:, :-1].float().flatten(0, 1), tokens[:, 1:].flatten())
            model.backward(loss)
            model.step()
        iteration += 1
        reduced = loss.detach().clone()
        torch.distributed.all_reduce(reduced)
        if rank == 0:
            lr = optimizer.param_groups[0]["lr"]
            scale = optimizer.cur_scale if hasattr(optimizer, "cur_scale") else 1.0
            print(f"iteration {iteration} | lr {lr:.5f} | lm loss {reduced.item() / 2:.4f} | scale {scale}", flush=True)
    if args.save:
        state = {"iteration": iteration, "args": vars(args), "checkpoint_version": 2.0}
        model.save_checkpoint(args.save, tag=f"iter_{iteration:07d}", client_state=state)
        if rank == 0:
            assert (Path(args.save) / f"iter_{iteration:07d}").is_dir()


main()
