"""A vision model in stages on DeepSpeed: its list of layers, a loader that repeats, and whole batches."""

import deepspeed
import made_up
import torch
from deepspeed.pipe import PipelineModule
from deepspeed.utils import RepeatingLoader
from torch import nn
from torch.utils.data import DataLoader

torch.set_num_threads(1)
deepspeed.init_distributed()


def join_layers(vision_model):
    return [*vision_model[:3], lambda x: torch.flatten(x, 1), *vision_model[4:]]


net = PipelineModule(
    layers=join_layers(made_up.convnet()),
    loss_fn=nn.CrossEntropyLoss(),
    num_stages=2,
    partition_method="parameters",
    activation_checkpoint_interval=0,
)
engine, _, _, _ = deepspeed.initialize(
    model=net,
    model_parameters=[p for p in net.parameters() if p.requires_grad],
    config={
        "train_batch_size": 16,
        "train_micro_batch_size_per_gpu": 4,
        "optimizer": {"type": "SGD", "params": {"lr": 0.05, "momentum": 0.9}},
        "gradient_clipping": 0.0,
    },
)
data_iter = iter(RepeatingLoader(DataLoader(made_up.digits(64), batch_size=4)))
losses = [engine.train_batch(data_iter=data_iter).item() for _ in range(6)]
if deepspeed.comm.get_rank() == 0:
    made_up.report("alexnet_pipeline", losses)
