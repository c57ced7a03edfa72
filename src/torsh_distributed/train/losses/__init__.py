"""What a loss is a mean of, found out before the first step, and how losses of parts are combined by it.

Read `loss_kind`, then `loss_probe`, which chooses one, and `step_weights`, which uses it.
"""
