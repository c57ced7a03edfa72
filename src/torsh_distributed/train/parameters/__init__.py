"""What scripts do with parameters besides training them: hooks, freezing, looking at them, changing them."""
