"""Consumers of events."""
