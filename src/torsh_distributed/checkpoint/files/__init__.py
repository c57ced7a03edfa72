"""The files of a checkpoint: `manifest` says what is in one, `block_hashes` whether it still is; none needs torch but
`tensor_archive`, which writes tensors as `torch.distributed.checkpoint` does."""
