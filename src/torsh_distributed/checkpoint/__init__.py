"""Training state on storage."""
