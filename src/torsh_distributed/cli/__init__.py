"""The torsh command."""
