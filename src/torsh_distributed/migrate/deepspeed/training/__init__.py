"""Training as DeepSpeed's engine does it: `deepspeed_engine` first, then `update_step` and what it uses."""
