"""Where offloaded arrays lie: tiers of memory, the forms arrays are held in, and the copies between them."""
