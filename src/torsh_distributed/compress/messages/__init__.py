"""What travels: bit packing, indices, sparse messages, and the envelope around every payload."""
