"""Strategies: how a model and its gradients are split over the mesh."""
