"""The `torsh` commands of federated training."""
