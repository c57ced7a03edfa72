"""`deepspeed.ops`: optimizers under DeepSpeed's names, without its C++."""
