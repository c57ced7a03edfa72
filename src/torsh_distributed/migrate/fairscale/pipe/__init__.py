"""FairScale's pipeline inside one process: `device_pipe` runs it, `skip_connections` go past stages, `balance_by`."""
