"""Hugging Face's Trainer with arguments from the command line and a DeepSpeed config file."""

from dataclasses import dataclass, field

import torch
from transformers import HfArgumentParser, LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments
from transformers.integrations import is_deepspeed_zero3_enabled


@dataclass
class ModelArguments:
    hidden_size: int = field(default=32)
    lora: bool = field(default=False)


def maybe_zero_3(param):
    from deepspeed import zero
    from deepspeed.runtime.zero.partition_parameters import ZeroParamStatus

    if hasattr(param, "ds_id"):
        assert param.ds_status == ZeroParamStatus.NOT_AVAILABLE
        with zero.GatheredParameters([param]):
            return param.data.detach().cpu().clone()
    return param.detach().cpu().clone()


model_args, training_args = HfArgumentParser((ModelArguments, TrainingArguments)).parse_args_into_dataclasses()
torch.manual_seed(0)
config = LlamaConfig(
    vocab_size=64,
    hidden_size=model_args.hidden_size,
    intermediate_size=48,
    num_hidden_layers=2,
    num_attention_heads=2,
    num_key_value_heads=2,
    max_position_embeddings=16,
    use_cache=False,
)
model = LlamaForCausalLM(config)
if model_args.lora:
    from peft import LoraConfig, get_peft_model

    model = get_peft_model(model, LoraConfig(r=4, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM"))
    model.enable_input_require_grads()
tokens = torch.randint(0, 64, (64, 12), generator=torch.Generator().manual_seed(1)) // 8
samples = [{"input_ids": row, "labels": row} for row in tokens]
trainer = Trainer(model=model, args=training_args, train_dataset=samples, eval_dataset=samples[:8])
result = trainer.train()
metrics = trainer.evaluate()
whole = {name: maybe_zero_3(param) for name, param in trainer.model.named_parameters() if param.requires_grad}
trainer.save_model()
trainer.save_state()
if trainer.is_world_process_zero():
    assert type(trainer.model_wrapped).__module__.startswith("torsh_distributed"), type(trainer.model_wrapped)
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    assert losses[-1] < losses[0], losses
    assert all(type(value) is torch.Tensor and value.numel() for value in whole.values())
    rates = [entry["learning_rate"] for entry in trainer.state.log_history if "learning_rate" in entry]
    print(
        f"zero3 {is_deepspeed_zero3_enabled()}, {len(whole)} trained tensors, eval loss {metrics['eval_loss']:.3f},"
        f" rates {rates[0]:.2e} to {max(rates):.2e}, {trainer.model_wrapped.global_steps} steps",
        flush=True,
    )
