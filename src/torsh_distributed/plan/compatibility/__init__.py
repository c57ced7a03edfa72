"""What does not go together in a plan, one rule each: read `rule.py`, then `rules.py`, which collects the others."""
