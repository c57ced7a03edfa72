"""FairScale's wrappers: `sharded_ddp` beside OSS, `fairscale_fsdp` on FSDP2, `auto_wrap`."""
