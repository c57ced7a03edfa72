"""Pages generated from the plan: the reference of its keys, and what goes together."""
