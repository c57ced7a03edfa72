"""Pre-training on DeepSpeed that stops and goes on: ZeRO-3, a checkpoint with the step in its client state."""

import tempfile

import deepspeed
import made_up
import torch

torch.set_num_threads(1)
deepspeed.init_distributed()
rank, world_size = deepspeed.comm.get_rank(), deepspeed.comm.get_world_size()
ds_config = {
    "train_micro_batch_size_per_gpu": 4,
    "optimizer": {"type": "AdamW", "params": {"lr": 1e-2, "weight_decay": 0.0}},
    "gradient_clipping": 1.0,
    "zero_optimization": {"stage": 3, "stage3_param_persistence_threshold": 0},
}
folder = [tempfile.mkdtemp()]
torch.distributed.broadcast_object_list(folder)
ids, labels = made_up.sentences(64).tensors
losses = []


def train(model, first, last):
    for step in range(first, last):
        rows = slice((step * world_size + rank) * 4, (step * world_size + rank + 1) * 4)
        loss = made_up.token_loss(model(ids[rows]), labels[rows])
        model.backward(loss)
        model.step()
        mean = loss.detach().clone()
        deepspeed.comm.all_reduce(mean)
        losses.append(mean.item() / world_size)


model = made_up.encoder()
model, _, _, _ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=ds_config)
train(model, 0, 3)
model.save_checkpoint(save_dir=folder[0], client_state={"checkpoint_step": 3})
with deepspeed.zero.Init(config_dict_or_path=ds_config):
    other = made_up.encoder(seed=9)
other, _, _, _ = deepspeed.initialize(model=other, model_parameters=other.parameters(), config=ds_config)
_, client_state = other.load_checkpoint(load_dir=folder[0])
train(other, client_state["checkpoint_step"], 6)
if rank == 0:
    made_up.report("hello", losses)
