"""Training with several ranks on one GPU."""
