"""What scripts do with parameters besides training them: hooks on gradients, freezing, looking at them and changing them."""
