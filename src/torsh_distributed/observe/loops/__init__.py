"""What a training loop does that tells nothing itself: `optimizer_steps` sees its steps, `model_watch` its model.

For torch's own DDP and FSDP2 loops, trainers of others and plain loops; installed only where a job is observed.
"""
