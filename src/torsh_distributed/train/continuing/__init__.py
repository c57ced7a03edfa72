"""How steps continue when ranks come and go: the interface that `elastic` implements (`elastic_steps`), and batches
that are divided again among other ranks (`divided_batches`). `running_changes` takes changes of the plan meanwhile."""
