"""How encoded messages become a mean: dense and sparse exchanges, checks before, and damage found on the way."""
