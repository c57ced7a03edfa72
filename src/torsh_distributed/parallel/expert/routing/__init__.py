"""Which experts a token goes to: `router`, then its `gate`, `admission` under a capacity, and `routing_stats`."""
