"""Checkpoints that DeepSpeed wrote: `deepspeed_state` is what they hold, read without running any of their code."""
