"""What travels between workers: `encoding`, `decoding`, errors, and on which of the two lanes (`lane_pair`)."""
