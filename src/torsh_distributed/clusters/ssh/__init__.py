"""`torsh submit --to ssh`: a list of hosts as a cluster."""
