"""What communication costs here: timings of collectives (`collective_timing`) and of the network (`network`)."""
