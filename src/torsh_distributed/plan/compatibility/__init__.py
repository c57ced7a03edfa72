"""What does not go together in a plan, one rule each: read `rule.py`, then `table.py`, which collects the others."""
