"""What communication did: the flight recorder, statistics, timings of collectives and of the network."""
