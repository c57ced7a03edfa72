"""Kubernetes: manifests against the published schemas, the engine against an API server that we wrote."""
