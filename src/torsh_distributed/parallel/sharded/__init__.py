"""Sharded data parallelism: `module` (ZeRO-2 and 3 on FSDP2), `zero1`, and how both communicate and compress."""
