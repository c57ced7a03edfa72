"""How a round's updates change the global model: the interface in `base`, each strategy by its name in `registry`."""
