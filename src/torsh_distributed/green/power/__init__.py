"""Less power: `pacing` by pauses between steps, `gpu_limit` by the driver's own limit, which is put back."""
