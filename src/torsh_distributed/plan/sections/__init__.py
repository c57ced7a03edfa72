"""The sections of a plan: `mesh`, `data` and `expert` split a model over ranks, `training` says how a step is made."""
