"""FairScale's optimizers: `oss` shards the state, `adascale` scales the learning rate, `sharded_scaler` the loss."""
