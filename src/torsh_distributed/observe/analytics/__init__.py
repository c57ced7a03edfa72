"""How training goes, from what a run recorded: `training_course` looks back, `loss_forecast` ahead with error bars."""
