"""Training with Horovod's optimizer: `distributed_optimizer` makes it, `reduction_buckets` packs gradients for it."""
