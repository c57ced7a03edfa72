"""What training does about its own failures, as the plan's section `recovery` says: `step_recovery` acts within a step,
`deferred_saves` keeps training while the disk is full; `state_snapshot` is what a roll back goes to, `open_incidents`
the account of it all."""
