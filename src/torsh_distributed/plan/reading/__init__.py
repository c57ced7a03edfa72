"""From files, variables and arguments to the values of a plan; `value_sources.py` uses the other two."""
