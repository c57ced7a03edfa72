"""FairScale's optimizers: `oss` shards the state and scales the loss, `adascale` scales the learning rate."""
