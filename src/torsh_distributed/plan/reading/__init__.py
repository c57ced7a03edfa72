"""From files, variables and arguments to the values of a plan."""
