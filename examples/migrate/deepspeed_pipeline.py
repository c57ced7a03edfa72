"""A pipeline as DeepSpeed's own examples are written: nothing in it knows of torsh_distributed.

torsh run --as deepspeed --num_gpus 2 examples/migrate/deepspeed_pipeline.py --pipeline-parallel-size 2
"""

import argparse

import deepspeed
import torch
import torch.nn as nn
import torch.nn.functional as F  # noqa: N812 - as DeepSpeed's examples write it
from deepspeed.pipe import LayerSpec, PipelineModule, TiedLayerSpec
from deepspeed.utils import RepeatingLoader
from torch.utils.data import TensorDataset

VOCABULARY, WIDTH, LENGTH = 32, 48, 12

CONFIG = {
    "train_batch_size": 32,
    "train_micro_batch_size_per_gpu": 8,
    "gradient_clipping": 1.0,
    "optimizer": {"type": "Adam", "params": {"lr": 3e-3}},
    "zero_optimization": {"stage": 0},
}


class Layer(nn.Module):
    """A layer that mixes neighbouring tokens."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm, self.up, self.down = (
            nn.LayerNorm(width),
            nn.Linear(2 * width, 4 * width),
            nn.Linear(4 * width, width),
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """A token and the one before it, through two linear layers."""
        hidden = self.norm(x)
        before = F.pad(hidden, (0, 0, 1, 0))[:, :-1]
        return x + self.down(F.gelu(self.up(torch.cat([hidden, before], dim=-1))))


class Embedding(nn.Embedding):
    """The embedding of tokens, whose weight is the head's as well."""


def head(embedding: nn.Module, hidden: torch.Tensor) -> torch.Tensor:
    """Logits by the embedding's weight."""
    return F.linear(hidden, embedding.weight)


def loss_fn(logits: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
    """The loss of predicting each next token."""
    return F.cross_entropy(logits[:, :-1].flatten(0, 1), tokens[:, 1:].flatten())


def main() -> None:
    """Train by whole batches."""
    parser = argparse.ArgumentParser(description="A pipeline with tied embeddings")
    parser.add_argument("--local_rank", type=int, default=-1)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("-p", "--pipeline-parallel-size", type=int, default=2)
    args = parser.parse_args()
    deepspeed.init_distributed(dist_backend="nccl")
    torch.manual_seed(3)
    net = PipelineModule(
        layers=[
            TiedLayerSpec("embed", Embedding, VOCABULARY, WIDTH),
            *(LayerSpec(Layer, WIDTH) for _ in range(4)),
            lambda x: F.layer_norm(x, (WIDTH,)),
            TiedLayerSpec("embed", Embedding, VOCABULARY, WIDTH, forward_fn=head),
        ],
        loss_fn=loss_fn,
        num_stages=args.pipeline_parallel_size,
        partition_method="type:layer",
        activation_checkpoint_interval=1,
    )
    start = torch.randint(0, VOCABULARY, (256, 1), generator=torch.Generator().manual_seed(0))
    tokens = (start + torch.arange(LENGTH)) % VOCABULARY
    engine, _, loader, _ = deepspeed.initialize(
        args=args,
        model=net,
        model_parameters=[p for p in net.parameters() if p.requires_grad],
        training_data=TensorDataset(tokens, tokens),
        config=CONFIG,
    )
    first = last = None
    for _ in range(args.steps):
        last = engine.train_batch().item()
        first = last if first is None else first
    evaluated = engine.eval_batch(iter(RepeatingLoader(loader)))
    stage = f"stage {engine.stage_id} of {engine.num_stages}"
    print(f"{stage}: loss {first:.3f} to {last:.3f}, evaluated {evaluated.item():.3f}, step {engine.global_steps}")


if __name__ == "__main__":
    main()
