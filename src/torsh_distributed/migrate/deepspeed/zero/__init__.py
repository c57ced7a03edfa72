"""`deepspeed.zero`: sharded construction, whole parameters in a `with` block, access to shards and masters."""
