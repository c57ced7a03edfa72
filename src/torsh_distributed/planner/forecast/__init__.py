"""How long and how much: `training_time` for tokens, failures and prices, `simulated_steps` for ranks that differ,
`run_learning` from recorded runs."""
