"""The processes of one node: read `attempt`, then `workers`, `output`, `exit_causes` and `guardian`."""
