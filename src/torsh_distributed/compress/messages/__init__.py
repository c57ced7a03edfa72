"""What travels: payload layouts, bit packing, sparse messages, and the envelope around them."""
