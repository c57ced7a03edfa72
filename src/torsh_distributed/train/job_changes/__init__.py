"""What a running job's changes mean for the Engine: ranks that come and go, another plan.

`elastic_steps` is the interface that `elastic` implements, `divided_batches` divides batches again among other ranks,
`running_changes` takes changes of the plan.
"""
