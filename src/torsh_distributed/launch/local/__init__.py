"""The processes of one node: `attempt` first, then workers, output, exit causes, and the guardian."""
