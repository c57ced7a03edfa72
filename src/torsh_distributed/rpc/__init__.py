"""Remote calls and the parameter server."""
