"""A DeepSpeed script as DeepSpeed's own examples are written: nothing in it knows of torsh_distributed.

cd examples/migrate; torsh run --as deepspeed --num_gpus 2 deepspeed_gpt.py --deepspeed_config ds_zero3.json
"""

import argparse

import deepspeed
import torch
import torch.nn as nn
import torch.nn.functional as F  # noqa: N812 - as DeepSpeed's examples write it
from deepspeed.utils import log_dist
from torch.utils.data import Dataset


def parse_args() -> argparse.Namespace:
    """The arguments of DeepSpeed's examples: its launcher passes --local_rank."""
    parser = argparse.ArgumentParser(description="A small GPT with ZeRO")
    parser.add_argument("--local_rank", type=int, default=-1, help="set by the launcher")
    parser.add_argument("--epochs", type=int, default=2)
    parser.add_argument("--save-dir", type=str, default=None)
    parser.add_argument("--resume", action="store_true")
    return deepspeed.add_config_arguments(parser).parse_args()


class Counting(Dataset):
    """Sequences that count up from anywhere, in steps of one to three: learned in seconds."""

    def __init__(self, num_samples: int = 96, length: int = 12, vocabulary: int = 32) -> None:
        generator = torch.Generator().manual_seed(0)
        start = torch.randint(0, vocabulary, (num_samples, 1), generator=generator)
        stride = torch.randint(1, 4, (num_samples, 1), generator=generator)
        self.tokens = (start + stride * torch.arange(length)) % vocabulary

    def __len__(self) -> int:
        """The number of sequences."""
        return len(self.tokens)

    def __getitem__(self, index: int) -> torch.Tensor:
        """One sequence."""
        return self.tokens[index]


class Block(nn.Module):
    """Attention and a feed-forward layer."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def attend(self, x: torch.Tensor) -> torch.Tensor:
        """Causal attention."""
        batch, length, width = x.shape
        parts = self.qkv(self.norm1(x)).view(batch, length, 3, self.heads, width // self.heads)
        q, k, v = parts.permute(2, 0, 3, 1, 4)
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.out(out.transpose(1, 2).reshape(batch, length, width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """One layer; backward recomputes its attention."""
        x = x + deepspeed.checkpointing.checkpoint(self.attend, x)
        return x + self.mlp(self.norm2(x))


class GPT(nn.Module):
    """A decoder of a few layers."""

    def __init__(
        self, vocabulary: int = 32, width: int = 32, layers: int = 2, heads: int = 2, length: int = 12
    ) -> None:
        super().__init__()
        self.tokens, self.places = nn.Embedding(vocabulary, width), nn.Embedding(length, width)
        self.blocks = nn.ModuleList(Block(width, heads) for _ in range(layers))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, vocabulary, bias=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """The loss of predicting each next token."""
        hidden = self.tokens(tokens) + self.places(torch.arange(tokens.shape[1], device=tokens.device))
        for block in self.blocks:
            hidden = block(hidden)
        logits = self.head(self.norm(hidden))
        return F.cross_entropy(logits[:, :-1].flatten(0, 1).float(), tokens[:, 1:].flatten())


def main() -> None:
    """Train, and save after every epoch."""
    args = parse_args()
    deepspeed.init_distributed()
    torch.manual_seed(7)
    with deepspeed.zero.Init(config_dict_or_path=args.deepspeed_config):
        model = GPT()
    deepspeed.checkpointing.configure(None, deepspeed_config=args.deepspeed_config)
    engine, _, loader, _ = deepspeed.initialize(
        args=args, model=model, model_parameters=model.parameters(), training_data=Counting()
    )
    first_epoch = 0
    if args.resume:
        path, client_state = engine.load_checkpoint(args.save_dir)
        first_epoch = client_state["epoch"]
        log_dist(f"resumed from {path} at step {engine.global_steps}", ranks=[0])
    for epoch in range(first_epoch, args.epochs):
        for tokens in loader:
            loss = engine(tokens.to(engine.local_rank if torch.cuda.is_available() else "cpu"))
            engine.backward(loss)
            engine.step()
        if engine.global_rank == 0:
            norm = engine.get_global_grad_norm()
            print(
                f"epoch {epoch}: step {engine.global_steps}, loss {loss.item():.4f}, norm {norm:.3f},",
                f"lr {engine.get_lr()[0]}",
            )
        if args.save_dir is not None:
            engine.save_checkpoint(args.save_dir, client_state={"epoch": epoch + 1})
    with deepspeed.zero.GatheredParameters(engine.module.head.weight):
        if engine.global_rank == 0:
            print(f"the head is {tuple(engine.module.head.weight.shape)} in {engine.module.head.weight.dtype}")
    print(f"rank {engine.global_rank} of {engine.world_size} is done, local_rank {args.local_rank}")


if __name__ == "__main__":
    main()
