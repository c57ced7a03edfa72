"""Moving bytes between ranks: stores, backends, groups, collectives."""
