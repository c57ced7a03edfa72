"""The comparison before the first step: a split model against the whole one, on a few rows of the first batch.

Read `first_batch`, then `whole_copy` (the model as one process has it), `small_batch` (the rows) and `module_trail`
(which module is the first to differ).
"""
