"""Rounds: `round_loop` asks clients and updates the model, `round_order` is what it asks, `round_file` its state."""
