"""When to run: `allocation` plans workers over time, `forecast` fills the time ahead, `carbon_policy` follows it."""
