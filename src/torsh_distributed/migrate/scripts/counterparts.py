"""Our counterpart of each call of torch, Accelerate, Lightning, Horovod, DeepSpeed and FairScale."""

from __future__ import annotations

COUNTERPARTS: dict[str, tuple[str, str]] = {
    "torch.distributed.init_process_group": ("td.init()", "finds its place under any launcher; picks the backend"),
    "torch.distributed.destroy_process_group": ("td.destroy_process_group()", "also called at exit"),
    "torch.nn.parallel.DistributedDataParallel": (
        "td.DistributedDataParallel(model)",
        "the same class, with compression and checks; or td.parallelize(model, optimizer, plan)",
    ),
    "torch.nn.DataParallel": ("td.DistributedDataParallel(model)", "one process for each device, started by torsh run"),
    "torch.distributed.fsdp.FullyShardedDataParallel": (
        "td.FullyShardedDataParallel(model)",
        "on FSDP2; or a plan with [fsdp] for td.parallelize",
    ),
    "torch.distributed.fsdp.fully_shard": ("", "stays; a plan with [fsdp] for td.parallelize does this"),
    "torch.distributed.pipeline.sync.Pipe": (
        "td.PipelineParallel(model, …)",
        "torch no longer has it; [pipeline] of a plan, or `torsh run --as fairscale` for one process",
    ),
    "torch.distributed.optim.ZeroRedundancyOptimizer": (
        'fsdp.strategy = "shard_optimizer"',
        "in a plan for td.parallelize, with mesh.shard",
    ),
    "torch.amp.GradScaler": ('precision.dtype = "fp16"', "the Engine scales losses itself; stays in loops of your own"),
    "torch.utils.data.distributed.DistributedSampler": (
        "td.DistributedSampler(dataset)",
        "continues where a checkpoint stopped; the Engine's batches() need none",
    ),
    "torch.distributed.all_reduce": ("td.all_reduce(tensor)", 'the reduction is a word: op="sum"'),
    "torch.distributed.broadcast": ("td.broadcast(tensor, src)", "the same"),
    "torch.distributed.reduce": ("td.reduce(tensor, dst)", "the same"),
    "torch.distributed.all_gather": ("td.all_gather(tensor)", "returns the list"),
    "torch.distributed.all_gather_into_tensor": ("td.all_gather_single(tensor)", "returns the rows of all ranks"),
    "torch.distributed.reduce_scatter_tensor": ("td.reduce_scatter_single(tensor)", "returns this rank's rows"),
    "torch.distributed.all_gather_object": ("td.all_gather_object(value)", "plain values, without pickle"),
    "torch.distributed.broadcast_object_list": ("td.broadcast_object(value, src)", "plain values, without pickle"),
    "torch.distributed.barrier": ("td.barrier()", "names the missing ranks after the deadline"),
    "torch.distributed.get_rank": ("td.rank()", "the same"),
    "torch.distributed.get_world_size": ("td.world_size()", "the same"),
    "torch.distributed.is_initialized": ("td.is_initialized()", "the same"),
    "torch.multiprocessing.spawn": ("td.spawn(function, nprocs)", "results come back, failures say why"),
    "torch.distributed.checkpoint.save": ("engine.save(path)", "or td.CheckpointManager"),
    "torch.distributed.checkpoint.load": ("engine.load(path)", "or td.CheckpointManager; any world size"),
    "accelerate.Accelerator": ("td.init() before it", "then it stays, on our backend; or td.parallelize with a plan"),
    "accelerate.PartialState": ("td.init() before it", "then it stays, on our backend"),
    "accelerate.notebook_launcher": ("td.spawn(function, nprocs)", "results come back, failures say why"),
    "accelerate.FullyShardedDataParallelPlugin": ("[fsdp] of a plan", "torsh migrate reads Accelerate's YAML"),
    "accelerate.DeepSpeedPlugin": ("torsh run --as deepspeed", "or [fsdp] of a plan"),
    "transformers.TrainingArguments": ("td.init() before it", "then it stays, on our backend"),
    "transformers.Trainer": ("", "stays, on our backend, with td.init() before its arguments"),
    "lightning.pytorch.Trainer": (
        "strategy=TorshStrategy(plan=…)",
        "from torsh_distributed.integrations.lightning_trainer: a plan says how the model is spread",
    ),
    "lightning.fabric.Fabric": (
        "strategy=TorshFabricStrategy(plan=…)",
        "from torsh_distributed.integrations.lightning_fabric: a plan says how the model is spread",
    ),
}
"""Calls with a counterpart, by the name under which their library documents them."""

METHODS: dict[str, dict[str, tuple[str, str]]] = {
    "torch.nn.parallel.DistributedDataParallel": {
        "no_sync": ("", "the same under td.DistributedDataParallel"),
        "join": ("", "the same under td.DistributedDataParallel"),
        "register_comm_hook": (
            "compression= of td.DistributedDataParallel",
            "or [compress] of a plan; td.migrate.pytorch.from_torch(comm_hook=…) says what each hook is",
        ),
    },
    "torch.distributed.fsdp.FullyShardedDataParallel": {
        "no_sync": ("", "the same under td.FullyShardedDataParallel"),
        "clip_grad_norm_": ("model.clip_grad_norm(max_norm)", "the same"),
        "summon_full_params": ("model.full_state_dict()", "whole tensors on every rank"),
    },
    "accelerate.Accelerator": dict.fromkeys(
        (
            "prepare",
            "backward",
            "accumulate",
            "gather",
            "gather_for_metrics",
            "reduce",
            "clip_grad_norm_",
            "save_state",
            "load_state",
            "wait_for_everyone",
            "unwrap_model",
        ),
        ("", "stays"),
    ),
    "deepspeed.initialize": dict.fromkeys(
        ("backward", "step", "train_batch", "eval_batch", "save_checkpoint", "load_checkpoint"),
        ("", "runs unchanged under `torsh run --as deepspeed`"),
    ),
    "lightning.fabric.Fabric": dict.fromkeys(("setup", "backward", "launch", "all_reduce"), ("", "stays")),
    "lightning.pytorch.Trainer": dict.fromkeys(("fit", "validate", "test"), ("", "stays")),
}
"""Methods of what those calls return."""

LIBRARIES = {
    "horovod": "runs unchanged under `torsh run --as horovod`",
    "deepspeed": "runs unchanged under `torsh run --as deepspeed`",
    "fairscale": "runs unchanged under `torsh run --as fairscale`",
}
"""Libraries that are stood in for."""

NOT_HERE = {
    "fairscale.nn.model_parallel.random": "not part of --as fairscale: seed ranks with torch.manual_seed",
    "fairscale.nn.MOELayer": "not part of --as fairscale: td.MoELayer",
    "fairscale.experimental": "not part of --as fairscale",
    "horovod.tensorflow": "not part of --as horovod, which is for torch",
    "horovod.keras": "not part of --as horovod, which is for torch",
    "horovod.mxnet": "not part of --as horovod, which is for torch",
    "horovod.spark": "not part of --as horovod, which is for torch",
    "horovod.ray": "not part of --as horovod, which is for torch",
}
"""Their parts that are not."""
