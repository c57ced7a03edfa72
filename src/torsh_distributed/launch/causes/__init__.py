"""Which rank is the cause: `inquiry` collects what is known, `cause_finder` judges, `waits` tells who waits."""
