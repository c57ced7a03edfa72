"""What keeps torch's gloo fast and abortable: the policy of its threads, and the connections that can be cut."""
