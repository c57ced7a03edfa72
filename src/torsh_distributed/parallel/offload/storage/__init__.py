"""Storage of offloaded arrays: memory `tiers`, the `forms` of their bytes, `tiered_storage`, and copies (`mover`)."""
