"""Memory that the ranks of a node share: `buffers` allocates it, `rows` exchanges rows through it.

`kept_memory` outlives the ranks.
"""
