"""Training with Horovod's optimizer: `horovod_optimizer` makes it, `reduction_buckets` packs gradients for it."""
