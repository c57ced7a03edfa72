"""Which experts a token goes to: `gate`, `router`, `admission`, and figures about it."""
