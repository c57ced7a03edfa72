"""Checkpoints that DeepSpeed wrote: `safe_files` reads their files, `deepspeed_state` is what they hold."""
