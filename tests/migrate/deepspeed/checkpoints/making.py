"""Checkpoints that DeepSpeed itself wrote, and what its own tools read in them; how it trains on."""

from __future__ import annotations

import importlib
from argparse import Namespace
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional

from tests.bed.real_deepspeed import use_deepspeed

NUM_STEPS, NUM_FURTHER = 3, 3
LR = 0.01
QUICK = ["0-fp32", "1-bf16", "2-fp32", "3-fp32"]
FURTHER = [
    *("0-bf16", "1-fp32", "2-fp16", "3-bf16"),
    *("2-fp32-round_robin_gradients", "2-fp32-elastic_checkpoint", "2-fp32-parameter_alignment", "3-fp32-small_groups"),
]
"""Stage and format, and what else is unusual about the shards."""
OPTIONS: dict[str, dict[str, Any]] = {
    "round_robin_gradients": {"round_robin_gradients": True},
    "elastic_checkpoint": {"elastic_checkpoint": True},
    "parameter_alignment": {"parameter_alignment": True},
    "small_groups": {"sub_group_size": 40},
}


class OddModel(nn.Module):
    """Sizes that divide evenly by nothing, a tied weight, a frozen one and a buffer."""

    running: Tensor

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embedding = nn.Embedding(11, 7)
        self.norm = nn.LayerNorm(7)
        self.middle = nn.Linear(7, 5)
        self.back = nn.Linear(5, 7)
        self.frozen = nn.Linear(7, 7, bias=False)
        self.frozen.weight.requires_grad_(False)
        self.head = nn.Linear(7, 11, bias=False)
        self.head.weight = self.embedding.weight
        self.register_buffer("running", torch.arange(3.0))

    def forward(self, tokens: Tensor) -> Tensor:
        hidden = self.frozen(self.norm(self.embedding(tokens)))
        logits: Tensor = self.head(hidden + self.back(functional.relu(self.middle(hidden))))
        return logits


def loss_of(logits: Tensor, targets: Tensor) -> Tensor:
    return functional.cross_entropy(logits.flatten(0, 1).float(), targets.flatten())


def groups_of(model: nn.Module) -> list[dict[str, Any]]:
    """Two groups, as trainers make them: matrices decay, vectors do not."""
    params = [param for param in model.parameters() if param.requires_grad]
    return [
        {"params": [param for param in params if param.ndim > 1], "weight_decay": 0.1},
        {"params": [param for param in params if param.ndim == 1], "weight_decay": 0.0},
    ]


def batch_of(rank: int, step: int) -> tuple[Tensor, Tensor]:
    tokens = torch.randint(0, 11, (2, 6), generator=torch.Generator().manual_seed(100 * step + rank))
    return tokens, tokens.roll(1, 1)


def config_of(stage: int, dtype: str, option: str = "") -> dict[str, Any]:
    config: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": 2,
        "gradient_clipping": 0.5,
        "optimizer": {"type": "AdamW", "params": {"lr": LR, "torch_adam": True}},
        "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 0, **OPTIONS.get(option, {})},
        "zero_allow_untested_optimizer": True,
    }
    if dtype != "fp32":
        config[dtype] = {"enabled": True, **({"initial_scale_power": 8} if dtype == "fp16" else {})}
    return config


@dataclass
class Made:
    """One checkpoint, as DeepSpeed knows it."""

    weights: dict[str, Tensor] = field(default_factory=dict)
    """What its zero_to_fp32 reads."""
    universal: dict[str, dict[str, Tensor]] = field(default_factory=dict)
    """What its ds_to_universal writes: name to fp32, exp_avg, exp_avg_sq."""
    losses: list[float] = field(default_factory=list)
    """Of this rank, in the steps after the save."""


def make_all(directory: str, cases: list[str]) -> dict[str, Made]:
    """On every rank: train, save and train on, for every case, under `directory/STAGE-DTYPE`."""
    deepspeed = use_deepspeed()
    made = {}
    for case in cases:
        stage, dtype, *option = case.split("-")
        config = config_of(int(stage), dtype, *option)
        made[case] = _make(deepspeed, Path(directory) / case, config, has_shards=stage != "0")
    return made


def _make(deepspeed: Any, directory: Path, config: dict[str, Any], *, has_shards: bool) -> Made:
    model = OddModel()
    engine, *_ = deepspeed.initialize(model=model, model_parameters=groups_of(model), config=config)
    made, rank = Made(), engine.global_rank
    for step in range(NUM_STEPS + NUM_FURTHER):
        if step == NUM_STEPS:
            engine.save_checkpoint(str(directory), client_state={"epoch": 4, "args": Namespace(layers=2)})
        tokens, targets = batch_of(rank, step)
        loss = loss_of(engine(tokens), targets)
        engine.backward(loss)
        engine.step()
        if step >= NUM_STEPS:
            made.losses.append(loss.item())
    engine.destroy()
    dist.barrier()
    if rank == 0 and has_shards:
        _read_back(made, directory)
        if not config["zero_optimization"].get("elastic_checkpoint"):  # its own converter does not read that form
            _make_universal(made, directory)
    dist.barrier()
    return made


def _read_back(made: Made, directory: Path) -> None:
    tool = importlib.import_module("deepspeed.utils.zero_to_fp32")
    whole = tool.get_fp32_state_dict_from_zero_checkpoint(str(directory))
    made.weights = {name: value.clone() for name, value in whole.items()}


def _make_universal(made: Made, directory: Path) -> None:
    converter = importlib.import_module("deepspeed.checkpoint.ds_to_universal")
    out = directory / "universal" / "global_step3_universal"
    arguments = Namespace(
        input_folder=str(directory / f"global_step{NUM_STEPS}"),
        output_folder=str(out),
        num_extract_workers=1,
        num_merge_workers=1,
        keep_temp_folder=False,
        strict=True,
        inject_missing_state=True,
    )
    converter.main(arguments)
    for path in out.glob("zero/*/*.pt"):
        value = torch.load(path, weights_only=True)
        value = value["param"] if isinstance(value, dict) else value
        if path.stem != "step":
            made.universal.setdefault(path.parent.name, {})[path.stem] = value.detach().clone()


def make_pipeline(directory: str) -> dict[str, Tensor]:
    """On two ranks: a pipeline of two stages; this rank's weights, by name."""
    deepspeed = use_deepspeed()
    pipe: Any = importlib.import_module("deepspeed.pipe")
    deepspeed.init_distributed()
    torch.manual_seed(0)
    specs = [
        pipe.LayerSpec(nn.Linear, 4, 5),
        nn.ReLU(),
        pipe.LayerSpec(nn.Linear, 5, 6),
        pipe.LayerSpec(nn.Linear, 6, 3),
    ]
    model = pipe.PipelineModule(layers=specs, num_stages=2, loss_fn=nn.MSELoss(), partition_method="uniform")
    config = {**config_of(1, "fp32"), "gradient_accumulation_steps": 2}
    engine, *_ = deepspeed.initialize(model=model, model_parameters=list(model.parameters()), config=config)
    generator = torch.Generator().manual_seed(1)
    batches = iter([(torch.randn(2, 4, generator=generator), torch.randn(2, 3, generator=generator)) for _ in range(4)])
    for _ in range(2):
        engine.train_batch(batches)
    engine.save_checkpoint(directory)
    return {name: param.detach().clone() for name, param in model.named_parameters()}
