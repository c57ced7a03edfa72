"""What happened: the flight recorder, statistics per operation and peer, and time covered by intervals."""
