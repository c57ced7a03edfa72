"""Offload under sharding: what fits (`shard_budget`), where shards are kept (`offloaded_shards`), their update."""
