"""What is around the steps: configs, checkpoints, sharded models under construction, communication, reports."""

import argparse
import json
import tempfile
from pathlib import Path

import deepspeed
import pytest
import torch
from deepspeed.accelerator import get_accelerator
from deepspeed.moe.layer import MoE
from deepspeed.moe.utils import split_params_into_different_moe_groups_for_optimizer
from deepspeed.monitor.config import get_monitor_config
from deepspeed.monitor.csv_monitor import csvMonitor
from deepspeed.monitor.monitor import MonitorMaster
from deepspeed.monitor.tensorboard import TensorBoardMonitor
from deepspeed.profiling.flops_profiler import get_model_profile
from deepspeed.runtime.config import DeepSpeedConfig
from deepspeed.runtime.utils import call_to_str, partition_balanced, see_memory_usage
from deepspeed.utils import (
    RepeatingLoader,
    safe_get_full_fp32_param,
    safe_get_full_grad,
    safe_get_full_optimizer_state,
    safe_set_full_fp32_param,
    set_z3_leaf_modules,
)
from deepspeed.utils.zero_to_fp32 import get_fp32_state_dict_from_zero_checkpoint, load_state_dict_from_zero_checkpoint
from small_cases import (
    ADAM,
    MICRO,
    WIDTH,
    Small,
    batches,
    config,
    engine_of,
    made,
    plain,
    rank,
    run_all,
    same,
    shared_folder,
    trained,
    world_size,
)
from torch import nn
from torch.nn import functional


def case_batch_sizes():
    def sizes(batch, micro, accumulation):
        given = {"train_batch_size": batch, "train_micro_batch_size_per_gpu": micro}
        return DeepSpeedConfig({**given, "gradient_accumulation_steps": accumulation}).train_batch_size

    assert (sizes(32, 16, 1), sizes(32, 8, 2)) == (32, 32)
    for wrong in ((32, 8, 1), (33, 17, 2)):
        with pytest.raises(AssertionError, match="train_batch"):
            sizes(*wrong)


def case_sources_of_a_config():
    path = str(Path(tempfile.mkdtemp()) / "ds.json")
    Path(path).write_text(json.dumps(config(0, optimizer=ADAM)))
    parser = argparse.ArgumentParser()
    parser.add_argument("--local_rank", type=int, default=0)
    args = deepspeed.add_config_arguments(parser).parse_args(["--deepspeed", "--deepspeed_config", path])
    wanted = plain(made(), count=2)
    for given in ({"args": args}, {"config": path}, {"config_params": config(0, optimizer=ADAM)}):
        model = made()
        engine = deepspeed.initialize(model=model, model_parameters=model.parameters(), **given)[0]
        same(trained(engine, batches(2)), wanted)
    for given in ({"args": args, "config": path}, {}):
        with pytest.raises(AssertionError, match=r"[Dd]eep[Ss]peed"):
            deepspeed.initialize(model=made(), **given)


def case_a_loader_of_the_engine():
    data = torch.utils.data.TensorDataset(torch.randn(21, WIDTH), torch.randint(0, WIDTH, (21,)))
    model, given = made(), config(1, optimizer=ADAM, dataloader_drop_last=True)
    engine, _, loader, _ = deepspeed.initialize(
        model=model, model_parameters=model.parameters(), training_data=data, config=given
    )
    assert len(trained(engine, loader)) == len(loader) == 21 // (MICRO * world_size)
    again = iter(RepeatingLoader(loader))
    assert len([next(again) for _ in range(7)]) == 7


def case_schedules():
    kinds = {
        "WarmupLR": {"warmup_max_lr": 0.01, "warmup_num_steps": 3},
        "WarmupDecayLR": {"warmup_max_lr": 0.01, "warmup_num_steps": 3, "total_num_steps": 10},
        "WarmupCosineLR": {"warmup_num_steps": 3, "total_num_steps": 10},
        "OneCycle": {"cycle_min_lr": 1e-5, "cycle_max_lr": 0.01, "cycle_first_step_size": 3},
        "LRRangeTest": {"lr_range_test_min_lr": 1e-4, "lr_range_test_step_size": 2, "lr_range_test_step_rate": 1.0},
    }
    for name, options in kinds.items():
        engine = engine_of(made(), config(0, scheduler={"type": name, "params": options}))
        trained(engine, batches(3))
        assert engine.get_lr() == engine.lr_scheduler.get_last_lr()
        assert engine.get_lr()[0] > 0


def case_checkpoints():
    for stage in range(4):
        for more in ({}, {"bf16": {"enabled": True}}):
            given = config(stage, scheduler={"type": "WarmupLR", "params": {"warmup_num_steps": 5}}, **more)
            data, folder = batches(6, dtype=torch.bfloat16 if more else torch.float32), shared_folder()
            engine = engine_of(made(), given)
            trained(engine, data[:3])
            engine.save_checkpoint(folder, client_state={"seen": [1, 2]})
            wanted = trained(engine, data[3:])
            other = engine_of(made(), given)
            _, client_state = other.load_checkpoint(folder)
            assert (client_state["seen"], other.global_steps) == ([1, 2], 3)
            same(trained(other, data[3:]), wanted, 1e-6)
            alone = engine_of(made(), given)
            alone.load_checkpoint(folder, load_module_only=True)
            assert alone.global_steps == 0
            alone.load_checkpoint(folder, tag="global_step3", load_optimizer_states=False)
            assert alone.global_steps == 3


def case_tags():
    folder, engine = shared_folder(), engine_of(made(), config(0))
    assert engine.load_checkpoint(folder)[0] is None
    engine.save_checkpoint(folder, tag="mine", save_latest=False)
    assert engine.load_checkpoint(folder)[0] is None
    assert engine.load_checkpoint(folder, tag="mine")[0] is not None
    engine.save_checkpoint(folder)
    assert (Path(folder) / "latest").read_text().strip() == "global_step0"
    strict = engine_of(made(), config(0, checkpoint={"tag_validation": "Fail"}))
    with pytest.raises(AssertionError, match="tag"):
        strict.save_checkpoint(folder, tag=f"of_rank_{rank}")


def case_weights_in_fp32():
    for stage in (1, 2, 3):
        folder, given = shared_folder(), config(stage, bf16={"enabled": True})
        given["zero_optimization"]["stage3_gather_16bit_weights_on_model_save"] = True
        engine = engine_of(made(), given)
        trained(engine, batches(2, dtype=torch.bfloat16))
        engine.save_checkpoint(folder)
        found = get_fp32_state_dict_from_zero_checkpoint(folder)
        assert {one.dtype for one in found.values()} == {torch.float32}
        loaded = load_state_dict_from_zero_checkpoint(made(), folder)
        assert torch.equal(loaded.linears[0].weight, found["linears.0.weight"])
        assert engine.save_16bit_model(folder, "model.bin")
        deepspeed.comm.barrier()
        half = torch.load(Path(folder) / "model.bin")
        assert all(torch.equal(half[name], one.bfloat16()) for name, one in found.items())


class Parent(nn.Module):
    """Fills the parameters of its part when it is built."""

    def __init__(self):
        super().__init__()
        self.part = Small()
        with deepspeed.zero.GatheredParameters(list(self.part.parameters()), modifier_rank=0):
            for param in self.part.parameters():
                param.data.fill_(0.5)

    def forward(self, inputs, labels):
        return self.part(inputs, labels)


def case_models_under_construction():
    with deepspeed.zero.Init(config_dict_or_path=config(3)):
        layer, model = nn.Linear(WIDTH, WIDTH), Parent()
    with deepspeed.zero.GatheredParameters(layer.weight, modifier_rank=0):
        if rank == 0:
            nn.init.constant_(layer.weight, 3.0)
    with deepspeed.zero.GatheredParameters(layer.weight):
        assert bool((layer.weight == 3.0).all() or rank)
    engine = engine_of(model, config(3))
    with deepspeed.zero.GatheredParameters(list(engine.parameters())):
        assert torch.equal(engine.module.part.linears[0].weight, torch.full((WIDTH, WIDTH), 0.5))
    trained(engine, batches(2))
    with deepspeed.zero.Init(enabled=False):
        assert not hasattr(nn.Linear(2, 2).weight, "ds_id")


def case_whole_values_of_sharded_parameters():
    for stage in (1, 2, 3):
        engine = engine_of(made(), config(stage, bf16={"enabled": True}))
        engine.backward(engine(*batches(1, dtype=torch.bfloat16)[0]))
        for param in engine.module.parameters():
            assert safe_get_full_grad(param).abs().sum() > 0
        engine.step()
        for param in engine.module.parameters():
            value = safe_get_full_fp32_param(param)
            assert value.dtype is torch.float32
            assert safe_get_full_optimizer_state(param, "exp_avg").shape == value.shape
            safe_set_full_fp32_param(param, torch.ones_like(value))
            assert bool((safe_get_full_fp32_param(param) == 1).all())


class Routed(nn.Module):
    """Experts of which each rank runs its own, and one that both run."""

    def __init__(self):
        super().__init__()
        self.experts = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(4))

    def forward(self, inputs):
        return sum(one(inputs) for index, one in enumerate(self.experts) if index in (rank, 3))


class Sparse(nn.Module):
    def __init__(self):
        super().__init__()
        self.routed, self.last = Routed(), nn.Linear(WIDTH, WIDTH)

    def forward(self, inputs, labels):
        return functional.cross_entropy(self.last(self.routed(inputs)), labels)


def case_leaf_modules():
    found = []
    for stage in (0, 2, 3):
        model = made(Sparse)
        set_z3_leaf_modules(model, [Routed])
        engine = engine_of(model, config(stage), optimizer=torch.optim.SGD(model.parameters(), lr=0.1))
        found.append(trained(engine, batches(4)))
        engine.eval()
        with torch.no_grad():
            engine(*batches(1)[0])
    same(found[1], found[0])
    same(found[2], found[0])


def case_experts():
    class Model(nn.Module):
        def __init__(self, ranks):
            super().__init__()
            self.first = nn.Linear(WIDTH, WIDTH)
            self.moe = MoE(WIDTH, expert=nn.Linear(WIDTH, WIDTH), num_experts=2, ep_size=ranks, k=1, min_capacity=0)

        def forward(self, inputs, labels):
            hidden, _, counts = self.moe(self.first(inputs))
            assert counts.sum() == MICRO
            return functional.cross_entropy(hidden, labels)

    for ranks in (1, 2):
        for stage in (0, 1, 2):
            model = made(Model, ranks)
            groups = split_params_into_different_moe_groups_for_optimizer(
                {"params": list(model.parameters()), "name": "all"}
            )
            engine = engine_of(model, config(stage), optimizer=torch.optim.AdamW(groups, lr=0.01))
            losses = trained(engine, batches(1) * 6)
            assert losses[-1] < losses[0]


def case_what_models_are_told():
    seen = []

    class Told(Small):
        def forward(self, inputs, labels, **told):
            seen.append((told["pld_theta"], told["curriculum_seqlen"]))
            return super().forward(inputs, labels)

    curriculum = {
        "enabled": True,
        "curriculum_type": "seqlen",
        "min_difficulty": 1,
        "max_difficulty": 3,
        "schedule_type": "fixed_discrete",
        "schedule_config": {"difficulty": [1, 2, 3], "max_step": [2, 4]},
    }
    given = config(0, curriculum_learning=curriculum, progressive_layer_drop={"enabled": True, "theta": 0.5})
    engine = engine_of(made(Told), given)
    trained(engine, batches(6))
    assert sorted({length for _, length in seen}) == [1, 2, 3]
    assert all(0.5 <= theta <= 1 for theta, _ in seen)


def case_communication():
    comm = deepspeed.comm
    value = torch.full((3,), rank + 1.0)
    comm.all_reduce(value)
    assert value.tolist() == [3.0] * 3
    comm.broadcast(value := torch.full((4,), float(rank)), 0)
    assert value.tolist() == [0.0] * 4
    comm.all_gather_into_tensor(out := torch.empty(4), torch.full((2,), float(rank)))
    assert out.tolist() == [0, 0, 1, 1]
    comm.reduce_scatter_tensor(out := torch.empty(2), torch.arange(4.0))
    assert out.tolist() == [4.0 * rank, 4.0 * rank + 2]
    comm.all_to_all_single(out := torch.empty(2), torch.arange(2.0) + 10 * rank)
    assert out.tolist() == [rank, 10.0 + rank]
    comm.inference_all_reduce(value := torch.ones(2))
    assert value.tolist() == [2.0, 2.0]
    group = comm.new_group([0, 1])
    assert comm.get_world_size(group=group) == 2
    comm.all_reduce(value := torch.ones(2), async_op=True).wait()
    assert value.tolist() == [2.0, 2.0]
    comm.send(torch.ones(2), 1) if rank == 0 else comm.recv(torch.empty(2), 0)
    comm.monitored_barrier()


def case_monitors_and_profiles():
    folder = shared_folder()
    sections = get_monitor_config({"csv_monitor": {"enabled": True, "output_path": folder, "job_name": "units"}})
    MonitorMaster(sections).write_events([("Train/loss", 1.5, 4)])
    csvMonitor(sections.csv_monitor).write_events([("Train/other", 2.5, 4)])
    assert TensorBoardMonitor(sections.tensorboard).enabled is False
    profile = {"enabled": True, "profile_step": 1, "top_modules": 2, "output_file": f"{folder}/flops.txt"}
    engine = engine_of(made(), config(1, flops_profiler=profile))
    trained(engine, batches(3))
    assert (engine.flops_profiler is not None) == (rank == 0)
    deepspeed.comm.barrier()
    for name, wanted in (("units/Train_other.csv", "4,2.5"), ("flops.txt", "400.00 MACs")):
        assert wanted in (Path(folder) / name).read_text()
    layers = nn.Sequential(nn.Linear(WIDTH, 4), nn.ReLU())
    flops, macs, params = get_model_profile(layers, (3, WIDTH), print_profile=False, as_string=False)
    assert (flops, macs, params) == (2 * 3 * WIDTH * 4, 3 * WIDTH * 4, 4 * WIDTH + 4)


def case_activation_checkpointing():
    deepspeed.checkpointing.configure(None, partition_activations=False, num_checkpoints=2)
    layer, inputs = made(nn.Linear, WIDTH, WIDTH), torch.randn(2, WIDTH, requires_grad=True)
    deepspeed.checkpointing.checkpoint(lambda one, factor: layer(one) * factor, inputs, 2.0).sum().backward()
    found, inputs.grad = inputs.grad, None
    (layer(inputs) * 2.0).sum().backward()
    assert deepspeed.checkpointing.is_configured()
    assert torch.equal(found, inputs.grad)


def case_devices():
    with deepspeed.OnDevice(dtype=torch.half, device="meta"):
        model = Small()
    assert all(param.is_meta and param.dtype is torch.half for param in model.parameters())
    assert Small().linears[0].weight.dtype is torch.float32
    accelerator = get_accelerator()
    assert accelerator.device_count() >= 1
    assert accelerator.communication_backend_name()
    assert accelerator.on_accelerator(torch.ones(1)) in (True, False)


def case_helpers():
    assert call_to_str("load", 1, name=2) == "load(1, name=2)"
    assert partition_balanced([1, 1, 1, 1], 2) == [0, 2, 4]
    see_memory_usage("here", force=False)
    elastic = {"enabled": True, "max_train_batch_size": 10000, "micro_batch_sizes": [8, 12, 16, 17]}
    elastic |= {"min_gpus": 32, "max_gpus": 1500, "version": 0.1}
    batch, _, _ = deepspeed.elasticity.compute_elastic_config(
        {"elasticity": elastic}, target_deepspeed_version=deepspeed.__version__, world_size=64
    )
    assert batch == 9792


def case_sections_without_effect():
    for more in ({"autotuning": {"enabled": True}}, {"hybrid_engine": {"enabled": True}}):
        same(trained(engine_of(made(), config(2, **more)), batches(2)), plain(made(), count=2))


def case_refusals():
    def refused(*, of, **more):
        with pytest.raises((RuntimeError, ValueError, AssertionError), match=of):
            deepspeed.initialize(model=made(), config={**config(0, optimizer=ADAM), **more})

    refused(of="eigenvalue of a DeepSpeed config is not supported", eigenvalue={"enabled": True})
    refused(of="amp of a DeepSpeed config is not supported", amp={"enabled": True})
    refused(of="OneBitAdam compresses gradients", optimizer={"type": "OneBitAdam", "params": {"lr": 0.01}})
    refused(of="neither DeepSpeed's nor a class of torch.optim", optimizer={"type": "Adamm", "params": {}})
    refused(of="cannot be simultaneously enabled", fp16={"enabled": True}, bf16={"enabled": True})
    refused(of="must be a whole number", zero_optimization={"stage": 1, "allgather_bucket_size": 0.5})
    refused(of="zero_optimization.stage", zero_optimization={"stage": 4})
    with pytest.raises(RuntimeError, match="serve the model with"):
        deepspeed.init_inference(made())


run_all(globals())
