"""How a step is computed: the sections `training`, `precision`, `activation` and `compile` of a plan."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal

from pydantic import Field
from typing_extensions import override

from torsh_distributed.plan.problems import Problem
from torsh_distributed.plan.section import Section, Words


class PrecisionConfig(Section):
    """Formats of computation and reduction. Parameters and optimizer state stay in fp32."""

    dtype: Literal["fp32", "bf16", "fp16", "fp8"] = "fp32"
    """Format of matrix products and activations. fp16 comes with loss scaling; bf16 needs none. fp8 computes the
    products of linear layers in 8 bits and all else in bf16: faster on wide layers, with compile.enabled."""

    fp8_recipe: Literal["tensorwise", "rowwise", "rowwise_with_gw_hp"] = "tensorwise"
    """How values are scaled to the range of fp8: one scale for a tensor (fastest), one for each row (an outlier costs
    precision to its row only), or rows with the gradients of weights in bf16 (most exact)."""

    fp8_fast_accumulation: bool = False
    """Sum the products of gradients with the fewer bits of the hardware's fast mode, as those of forward always are."""

    fp8_skip: Words = ()
    """Patterns of linear layers that stay in bf16 under fp8, matched part by part. The head, and layers whose sizes are
    not multiples of 16, always do."""

    fp8_emulate: bool = False
    """Compute fp8 products in fp32 from rounded values: the same numbers without the speed, for devices without fp8."""

    reduce_dtype: Literal["same", "fp32", "bf16", "fp16"] = "same"
    """Format in which gradients are summed over ranks; `same` keeps theirs. Where shards compute in 16 bits and several
    passes make a step, theirs is fp32: FSDP2 adds passes up in the format in which it reduces."""

    output_dtype: Literal["same", "fp32", "bf16", "fp16"] = "same"
    """Format in which a sharded model returns floating outputs, for a loss that needs fp32; `same` keeps theirs."""

    cast_forward_inputs: bool = True
    """Give every sharded piece its inputs in the format of computation. Off: the model casts them itself, and layers
    that need fp32 inputs get them."""

    buffer_dtype: Literal["same", "fp32", "bf16", "fp16"] = "same"
    """Format of the model's buffers; `same` does not change them."""

    init_loss_scale: float = Field(default=65536.0, gt=0)
    """First loss scale under fp16. It halves on overflow."""

    loss_scale_growth_interval: int = Field(default=2000, ge=1)
    """Steps without overflow after which the loss scale doubles."""


class CompileConfig(Section):
    """torch.compile: kernels fused for the model's shapes, built at the first step."""

    enabled: bool = False
    """Compile the model. The first step takes longer, often a minute; later ones are faster."""

    scope: Literal["layers", "model"] = "layers"
    """What becomes one graph: each layer that repeats, compiled once for all of them and with every parallelism; or the
    whole model and the loss, for replicas only."""

    autotune: bool = False
    """Try several kernels for each matrix product and keep the fastest. The first step takes minutes."""

    cuda_graphs: bool = False
    """Replay the kernels of a step as one recording, which saves the host's launches: for small models on a GPU with
    batches of one shape. Needs `scope = "model"`."""

    dynamic: Literal["auto", "never", "always"] = "auto"
    """Whether one graph serves several shapes: once a second shape is seen, never (each shape is compiled), or from the
    start."""

    graph_breaks: Literal["warn", "refuse"] = "warn"
    """What to do where torch cannot compile a part of a layer and runs it as it is."""

    recompile_limit: int = Field(default=64, ge=1)
    """Versions of one layer that are kept, such as for other shapes and for evaluation; later ones run as they are."""


class ActivationConfig(Section):
    """Activation checkpointing: trades time for memory."""

    strategy: Literal["none", "uniform", "by_size", "selective", "budget"] = "none"
    """What backward recomputes: nothing, every n-th layer, large activations, all but costly operations, or what it
    must so that a rank's memory stays within `memory_budget_gb`."""

    every_n_layers: int = Field(default=4, ge=1)
    """The n of `uniform`; 1 recomputes every layer."""

    threshold_mb: float = Field(default=100.0, gt=0)
    """Under `by_size`, layers whose activations reach this size are recomputed."""

    memory_budget_gb: float | None = Field(default=None, gt=0)
    """Under `budget`, the estimated peak of a rank in GB of 10**9 bytes, with parameters, state and all else. The two
    keys below are then found before the first step, with the least time spent on recomputing."""

    whole_layers: Words = ()
    """Under `budget`, names of the layers that are recomputed whole, in place of finding them."""

    selective_layers: Words = ()
    """Under `budget`, names of the layers of which all but costly operations are recomputed."""

    offload_to_cpu: bool = False
    """Move the activations that are kept to host memory until backward needs them."""

    disk_dir: str | None = Field(default=None, min_length=1)
    """Directory of a mapped file to which the activations that are kept move until backward needs them; tensors under
    64 KiB stay. Left out: no disk is used."""

    disk_budget_gb: float = Field(default=256.0, gt=0)
    """Disk space that a rank's activations may use in `disk_dir`."""

    @property
    def is_decided(self) -> bool:
        """Whether it is known which layers are recomputed; else the memory budget has to be looked at first."""
        return self.strategy != "budget" or self.memory_budget_gb is None or self._names_layers

    @property
    def _names_layers(self) -> bool:
        return bool(self.whole_layers or self.selective_layers)

    @override
    def find_problems(self) -> Iterator[Problem]:
        if self.strategy == "budget" and self.memory_budget_gb is None and not self._names_layers:
            yield Problem(
                "memory_budget_gb",
                'activation.strategy = "budget" needs activation.memory_budget_gb: the memory that a rank may need',
                "set memory_budget_gb = 70.0, or name layers in whole_layers or selective_layers",
            )
        both = sorted({*self.whole_layers} & {*self.selective_layers})
        if both:
            yield Problem(
                "selective_layers",
                f"{both[0]} is in activation.whole_layers and in activation.selective_layers",
                "name each layer once: whole_layers recomputes all of it",
            )
        if self.offload_to_cpu and self.disk_dir is not None:
            yield Problem(
                "disk_dir",
                "activation.offload_to_cpu and activation.disk_dir exclude each other",
                "leave one of them out",
            )


class TrainingConfig(Section):
    """Steps, batch and learning rate. They mean the same at every world size."""

    steps: int = Field(default=1000, ge=1)
    """Optimizer updates in a run."""

    batch_size: int = Field(default=32, ge=1)
    """Samples in one optimizer update, over all ranks and accumulated passes."""

    gradient_accumulation: int = Field(default=1, ge=1)
    """Forward and backward passes per update on each rank. More passes fit a large batch into little memory."""

    gradient_clipping: float | None = Field(default=None, gt=0)
    """Largest norm of the whole gradient; larger gradients are scaled down to it. Left out: no clipping."""

    learning_rate: float = Field(default=1e-3, gt=0)
    """Learning rate of the optimizer that the command line builds."""

    lr_scaling: Literal["none", "linear", "square_root", "adaptive"] = "none"
    """How the learning rate grows with the number of replicas: not at all, linearly, with the square root, or by
    sqrt(batch_size / 32)."""

    warmup_steps: int = Field(default=0, ge=0)
    """Steps over which the learning rate rises from 0."""

    seed: int = Field(default=0, ge=0, le=2**32 - 1)
    """Seed of the initial weights and of the order of samples."""

    exactly_once: bool = False
    """Promise that an epoch has every sample once, after any restart and at any number of ranks: data that cannot say
    where they are, and orders that cannot be repeated, are refused."""

    loss_is: Literal["auto", "mean", "mean_of_counted", "sum", "global_mean"] = "auto"
    """What the loss of a batch is: a mean over samples, a mean over the labels other than -100, a sum, or a mean that
    the loss computed over all ranks itself (`td.global_mean`). `auto` finds out with the first batch: it watches the
    loss functions of torch, and refuses a loss that is not made of those of its samples. A loss_fn that returns
    `(sum, count)` needs nothing else."""

    gather_for_loss: bool = False
    """Give loss_fn the outputs and targets of all ranks, with gradients to those of this rank: for losses that compare
    samples with each other, such as contrastive ones."""

    sync_batch_norm: bool = False
    """Let BatchNorm layers take their statistics over the batch of all ranks, as one process would."""

    attention: Literal["auto", "flash", "efficient", "cudnn", "math"] = "auto"
    """Kernel of scaled_dot_product_attention that is tried first on a GPU; the others follow where it does not apply.
    `auto` leaves the order to torch."""

    fused_loss: bool | Literal["auto"] = "auto"
    """Compute the model's head and its cross-entropy together, some tokens at a time: the logits of a large vocabulary
    never exist whole. Works with losses that end in torch's cross_entropy, as those of transformers do. `auto` does so
    on a GPU from 16,384 classes on, where the rest of the plan allows it, and stops if the loss asks for the logits."""

    log_every: int = Field(default=10, ge=1)
    """Steps between progress lines."""

    auto_optimize: Literal["off", "exact", "lossy"] = "off"
    """Try the advice of `torsh why` while the job runs, one change at a time, and keep what makes steps faster: `exact`
    tries what leaves losses as they are (sizes of buckets, passes, prefetching), `lossy` also compressed gradients."""

    auto_optimize_window: int = Field(default=15, ge=5)
    """Steps that are measured before and after a change, in six turns."""

    @override
    def find_problems(self) -> Iterator[Problem]:
        if self.gradient_accumulation > self.batch_size:
            yield Problem(
                "gradient_accumulation",
                f"training.gradient_accumulation {self.gradient_accumulation} is above training.batch_size"
                f" {self.batch_size}",
                "a pass needs at least one sample",
            )
        if self.warmup_steps > self.steps:
            yield Problem(
                "warmup_steps",
                f"training.warmup_steps {self.warmup_steps} is above training.steps {self.steps}",
                "warm up for fewer steps: the learning rate would never reach its value",
            )
