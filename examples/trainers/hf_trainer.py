"""A Hugging Face `Trainer` script on our backend; TRL's trainers are `Trainer`s and change alike.

torsh run --nproc-per-node 2 examples/trainers/hf_trainer.py
torchrun --nproc-per-node 2 examples/trainers/hf_trainer.py
"""

import tempfile

import torch
from torch import Tensor
from torch.utils.data import Dataset
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

import torsh_distributed as td

td.init()


class Counting(Dataset[dict[str, Tensor]]):
    """Sequences that count upwards from a random number."""

    def __len__(self) -> int:
        """The number of sequences."""
        return 64

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        """One sequence, as inputs and labels."""
        tokens = (torch.arange(16) + index) % 64
        return {"input_ids": tokens, "labels": tokens}


torch.manual_seed(0)
model = LlamaForCausalLM(
    LlamaConfig(
        vocab_size=64,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
    )
)
with tempfile.TemporaryDirectory() as directory:
    arguments = TrainingArguments(
        output_dir=directory,
        max_steps=8,
        per_device_train_batch_size=4,
        learning_rate=3e-3,
        logging_steps=4,
        save_strategy="no",
        report_to=[],
        disable_tqdm=True,
        use_cpu=not torch.cuda.is_available(),
    )
    trainer = Trainer(model=model, args=arguments, train_dataset=Counting())
    result = trainer.train()
if td.rank() == 0:
    print(f"step {result.global_step}: loss {result.training_loss:.4f} on {torch.distributed.get_backend()}")
