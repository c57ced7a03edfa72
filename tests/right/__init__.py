"""A standing hunt for losses that differ from one process without a word.

`training_parts` has models, losses, data and optimizers; `training_case` draws combinations of them with a plan;
`case_runs` trains one in plain torch and on ranks. `python -m tests.right --seed 7 --cases 100` looks for new ones.
"""
