"""How an engine trains at every stage: optimizers, accumulation, formats, modules that share, repeat or leave out."""

import torch
from deepspeed.ops.adam import DeepSpeedCPUAdam, FusedAdam
from small_cases import (
    WIDTH,
    Small,
    adamw,
    batches,
    config,
    engine_of,
    made,
    mean,
    plain,
    rank,
    run_all,
    same,
    sgd,
    trained,
    world_size,
)
from torch import nn
from torch.nn import functional
from torch.optim.lr_scheduler import LambdaLR


def case_stages():
    for stage in range(4):
        same(trained(engine_of(made(), config(stage)), batches(6)), plain(made()))


def case_accumulation_and_clipping():
    wanted = plain(made(), accumulation=2, clip=0.1)
    for stage in range(4):
        same(trained(engine_of(made(), config(stage, 2, gradient_clipping=0.1)), batches(6)), wanted)


def case_optimizers_of_scripts():
    kinds = (
        (lambda params: FusedAdam(params, lr=0.01), adamw),
        (lambda params: DeepSpeedCPUAdam(params, lr=0.01), adamw),
        (sgd, sgd),
        (lambda params: torch.optim.RMSprop(params, lr=0.01), lambda params: torch.optim.RMSprop(params, lr=0.01)),
    )
    for stage in (1, 2, 3):
        for kind, reference in kinds:
            model = made()
            engine = engine_of(model, config(stage), optimizer=kind(model.parameters()))
            same(trained(engine, batches(6)), plain(made(), reference))


def case_optimizers_of_configs():
    kinds = {
        "AdamW": ({"lr": 0.01, "weight_decay": 0.1}, torch.optim.AdamW),
        "SGD": ({"lr": 0.1, "momentum": 0.9}, torch.optim.SGD),
        "Adagrad": ({"lr": 0.1}, torch.optim.Adagrad),
    }
    for name, (options, kind) in kinds.items():
        for stage in (0, 2):
            engine = engine_of(made(), config(stage, optimizer={"type": name, "params": options}))
            same(trained(engine, batches(6)), plain(made(), lambda params: kind(params, **options)))  # noqa: B023


def case_optimizers_and_schedules_as_functions():
    def falling(optimizer):
        return LambdaLR(optimizer, lambda step: 1 / (step + 1))

    wanted = plain(made(), schedule=falling)
    same(trained(engine_of(made(), config(1), optimizer=adamw, lr_scheduler=falling), batches(6)), wanted)
    model = made()
    optimizer = adamw(model.parameters())
    engine = engine_of(model, config(1), optimizer=optimizer, lr_scheduler=falling(optimizer))
    same(trained(engine, batches(6)), wanted)


def case_frozen_and_unused_layers():
    def half_frozen():
        model = Small(2, True)
        model.linears[0].weight.requires_grad_(False)
        return model

    for stage in range(4):
        same(trained(engine_of(made(half_frozen), config(stage)), batches(6)), plain(made(half_frozen)))


class Scales(nn.Module):
    """More ranks than rows in some parameters, and a layer that runs twice."""

    def __init__(self, count):
        super().__init__()
        self.scales = nn.ParameterList(torch.randn(WIDTH if index % 2 else 1) for index in range(count))
        self.layer = nn.Linear(WIDTH, WIDTH, bias=False)

    def forward(self, inputs, labels):
        inputs = self.layer(torch.relu(self.layer(inputs)))
        for scale in self.scales:
            inputs = inputs * scale
        return functional.cross_entropy(inputs, labels)


def case_small_parameters_and_repeated_layers():
    for count in (1, 3):
        for stage in (1, 2, 3):
            same(trained(engine_of(made(Scales, count), config(stage)), batches(6)), plain(made(Scales, count)))


def case_backward_of_the_loss_itself():
    for stage in range(4):
        engine, losses = engine_of(made(), config(stage)), []
        for inputs, labels in batches(4):
            loss = engine(inputs, labels)
            loss.backward()
            engine.step()
            losses.append(loss.detach())
        same(mean(losses), plain(made(), count=4))


def case_boundaries_set_by_the_script():
    for stage in range(4):
        engine, losses = engine_of(made(), config(stage, 2)), []
        for step, pair in enumerate(batches(6)):
            engine.set_gradient_accumulation_boundary(step % 2 == 1)
            loss = engine(*pair)
            engine.backward(loss)
            engine.step()
            assert engine.is_gradient_accumulation_boundary() == (step % 2 == 1)
            losses.append(loss.detach())
        same(mean(losses), plain(made(), accumulation=2))


def case_no_sync():
    for stage in (0, 1):
        engine, losses = engine_of(made(), config(stage, 2)), []
        data = batches(6)
        for first, second in zip(data[::2], data[1::2], strict=True):
            with engine.no_sync():
                losses.append(engine(*first))
                engine.backward(losses[-1])
            engine.step()
            losses.append(engine(*second))
            engine.backward(losses[-1])
            engine.step()
        same(mean([loss.detach() for loss in losses]), plain(made(), accumulation=2))


def case_sums_of_gradients():
    for more in (
        {"prescale_gradients": True},
        {"prescale_gradients": True, "gradient_predivide_factor": 2.0},
        {"communication_data_type": "fp32"},
    ):
        same(trained(engine_of(made(), config(0, **more)), batches(6)), plain(made()))


def case_fp16_with_a_dynamic_scale():
    for stage in range(4):
        engine = engine_of(made(), config(stage, fp16={"enabled": True, "initial_scale_power": 8}))
        same(trained(engine, batches(6, dtype=torch.half)), plain(made()), 2e-2)


def case_fp16_skips_an_overflow():
    given = config(
        1, fp16={"enabled": True, "loss_scale": 0, "initial_scale_power": 8, "loss_scale_window": 20, "hysteresis": 1}
    )
    engine = engine_of(made(), given)
    assert engine.optimizer.dynamic_loss_scale is True
    for step, pair in enumerate(batches(4, dtype=torch.half)):
        engine.backward(engine(*pair) * (float("inf") if step == 1 and rank == 0 else 1))
        engine.step()
    assert (engine.optimizer.cur_scale, engine.skipped_steps) == (128, 1)
    fixed = engine_of(made(), config(0, fp16={"enabled": True, "loss_scale": 128.0}))
    assert (fixed.optimizer.cur_scale, fixed.optimizer.dynamic_loss_scale) == (128, False)


def case_bf16_with_gradients_in_fp32():
    """Rounded weights, gradients of them added up in fp32, masters in fp32."""

    def reference():
        model = made().bfloat16()
        masters = [param.detach().float() for param in model.parameters()]
        optimizer = adamw([nn.Parameter(one) for one in masters])
        masters = optimizer.param_groups[0]["params"]
        data = [batches(8, one, torch.bfloat16) for one in range(world_size)]
        losses = []
        for step in range(8):
            for own in data:
                for param in model.parameters():
                    param.grad = None
                loss = model(*own[step])
                loss.backward()
                losses.append(loss.item() / world_size)
                for master, param in zip(masters, model.parameters(), strict=True):
                    part = param.grad.float() / (4 * world_size)
                    master.grad = part if master.grad is None else master.grad + part
            if step % 4 == 3:
                optimizer.step()
                optimizer.zero_grad()
                for master, param in zip(masters, model.parameters(), strict=True):
                    param.data.copy_(master)
        return [sum(losses[2 * step : 2 * step + 2]) for step in range(8)]

    for stage in (1, 2, 3):
        given = config(stage, 4, bf16={"enabled": True}, data_types={"grad_accum_dtype": "fp32"})
        given["communication_data_type"] = "fp32"
        engine = engine_of(made(), given)
        assert engine.zero_optimization_stage() == stage
        same(trained(engine, batches(8, dtype=torch.bfloat16)), reference(), 1e-3)
        assert all(type(param).__name__ == "Parameter" for param in engine.module.parameters()) == (stage < 3)


def case_autocast():
    engine = engine_of(made(), config(1, torch_autocast={"enabled": True, "dtype": "bfloat16"}))
    same(trained(engine, batches(6)), plain(made()), 5e-2)


def case_offload():
    for stage in (1, 2, 3):
        zero = {"offload_optimizer": {"device": "cpu", "pin_memory": False}}
        zero |= {"offload_param": {"device": "cpu"}} if stage == 3 else {}
        same(trained(engine_of(made(), config(stage, zero=zero)), batches(6)), plain(made()))


class Bags(nn.Module):
    """Sparse gradients."""

    def __init__(self):
        super().__init__()
        self.bags, self.layer = nn.EmbeddingBag(20, WIDTH, sparse=True), nn.Linear(WIDTH, WIDTH)

    def forward(self, ids, labels):
        return functional.cross_entropy(self.layer(self.bags(ids)), labels)


def case_sparse_gradients():
    def ids(step, of_rank):
        return torch.randint(0, 20, (2, 4), generator=torch.Generator().manual_seed(10 * step + of_rank))

    model, labels, found, wanted = made(Bags), torch.tensor([1, 2]), [], []
    engine = engine_of(model, config(0, sparse_gradients=True), optimizer=torch.optim.SGD(model.parameters(), lr=0.1))
    other = made(Bags)
    optimizer = torch.optim.SGD(other.parameters(), lr=0.1)
    for step in range(3):
        found.append(engine(ids(step, rank), labels))
        engine.backward(found[-1])
        engine.step()
        loss = torch.stack([other(ids(step, one), labels) for one in range(world_size)]).mean()
        wanted.append(loss.item())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    same(mean([loss.detach() for loss in found]), wanted)


def case_several_outputs():
    class Several(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(WIDTH, WIDTH)

        def forward(self, pairs=None, weights=()):
            losses = [functional.cross_entropy(self.layer(inputs), labels) for inputs, labels in pairs]
            return {"loss": sum(weight * loss for weight, loss in zip(weights, losses, strict=True)), "parts": losses}

    for stage in (0, 1, 3):
        engine = engine_of(made(Several), config(stage))
        before = [param.detach().clone() for param in engine.module.parameters()]
        out = engine(pairs=batches(2), weights=(0.3, 0.7))
        assert len(out["parts"]) == 2
        engine.backward(out["loss"])
        engine.step()
        assert any((one != other).any() for one, other in zip(engine.module.parameters(), before, strict=True))


def case_compiled():
    engine = engine_of(made(), config(0))
    engine.compile(backend="eager")
    assert engine.is_compiled
    same(trained(engine, batches(6)), plain(made()))


def case_evaluation_in_between():
    wanted = plain(made())
    for stage in range(4):
        engine = engine_of(made(), config(stage))
        losses = trained(engine, batches(6)[:3])
        engine.eval()
        with torch.no_grad():
            engine(*batches(1)[0])
        engine.train()
        engine.empty_partition_cache()
        same(losses + trained(engine, batches(6)[3:]), wanted)
        engine.destroy()


run_all(globals())
