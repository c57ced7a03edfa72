"""Training on edge nodes."""
