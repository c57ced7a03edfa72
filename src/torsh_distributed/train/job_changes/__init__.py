"""What a running job's changes mean for the Engine: ranks that come and go, another plan.

`elastic_steps` is the interface that `elastic` implements, `step_in_progress` what becomes of a step when the world
changes, `divided_batches` divides batches again among other ranks, `running_changes` takes changes of the plan.
`auto_optimization` tries changes by itself.
`automatic_plan` has a plan chosen before the first step.
"""
