"""Which experts a token goes to: `router`, with its gate and the admission under a capacity, and `routing_stats`."""
