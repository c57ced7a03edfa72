"""A GPT in stages as Megatron's layers are on DeepSpeed: they pass (hidden, mask), and the head is the embedding."""

import deepspeed
import made_up
import torch
from deepspeed.pipe import LayerSpec, PipelineModule, TiedLayerSpec
from torch import nn

torch.set_num_threads(1)
deepspeed.init_distributed()


class EmbeddingPipe(nn.Module):
    """Makes the hidden state and the mask that all layers get."""

    def __init__(self):
        super().__init__()
        self.word_embeddings = nn.Embedding(made_up.VOCABULARY, made_up.WIDTH)

    @property
    def weight(self):
        """What the head shares."""
        return self.word_embeddings.weight

    def forward(self, args):
        input_ids, attention_mask = args
        return self.word_embeddings(input_ids), attention_mask


class ParallelTransformerLayerPipe(nn.TransformerEncoderLayer):
    """A layer of attention that hands the mask on."""

    def __init__(self):
        super().__init__(made_up.WIDTH, 2, 32, 0.0, batch_first=True)

    def forward(self, args):
        hidden, attention_mask = args
        return super().forward(hidden, src_mask=attention_mask), attention_mask


def logits(embedding, args):
    """The tied head."""
    return nn.functional.linear(args[0], embedding.weight)


net = PipelineModule(
    layers=[
        TiedLayerSpec("embed", EmbeddingPipe, tied_weight_attr="weight"),
        *[LayerSpec(ParallelTransformerLayerPipe) for _ in range(4)],
        TiedLayerSpec("embed", EmbeddingPipe, forward_fn=logits, tied_weight_attr="weight"),
    ],
    num_stages=2,
    loss_fn=made_up.token_loss,
    partition_method="type:transformer",
    seed_layers=True,
    base_seed=1,
)
engine, _, _, _ = deepspeed.initialize(
    model=net,
    optimizer=torch.optim.SGD([p for p in net.parameters() if p.requires_grad], lr=0.1),
    config={"train_micro_batch_size_per_gpu": 4, "gradient_accumulation_steps": 2, "gradient_clipping": 0.0},
)
causal = torch.ones(made_up.LENGTH, made_up.LENGTH, dtype=torch.bool).triu(1)
engine.set_batch_fn(lambda batch: ((batch[0], causal), batch[1]))
data = torch.utils.data.DataLoader(made_up.sentences(40), batch_size=4)
data_iter = iter(data)
losses = [engine.train_batch(data_iter).item() for _ in range(5)]
if deepspeed.comm.get_rank() == 0:
    made_up.report("gpt_pipeline", losses)
