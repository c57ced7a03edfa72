"""Which plan is best: `layouts` enumerates meshes, `ranking` keeps what is legal and fits, the fastest first."""
