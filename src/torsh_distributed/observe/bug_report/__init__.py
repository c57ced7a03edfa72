"""The bundle for a bug report: `collect` gathers it, `masking` keeps secrets out of it."""
