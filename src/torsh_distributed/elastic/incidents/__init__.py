"""What went wrong in runs: `incident_history` reads incidents and their statistics."""
