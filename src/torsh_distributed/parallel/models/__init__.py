"""Questions about a model: which modules belong together, is it the same on all ranks, how it gets its weights."""
