"""Less power: `pacing` by pauses between steps, `gpu_limit` and `cpu_settings` by the driver's and
the kernel's own settings, which are put back."""
