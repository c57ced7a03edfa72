"""DeepSpeed's mixture of experts: read `moe_layer` first, then `gating`, `expert_modules` and `stacked_modules`."""
