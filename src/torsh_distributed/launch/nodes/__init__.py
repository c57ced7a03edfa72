"""Several nodes: `coordinator` decides, `leader` and `follower` carry it out over signed connections."""
