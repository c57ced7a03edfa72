"""What training does about its own failures, as the plan's section `recovery` says: `step_recovery` acts within a step
and rolls back to a snapshot in memory; `open_incidents` lets saves wait for a full disk and accounts for it all."""
