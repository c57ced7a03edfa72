"""Memory that the ranks of a node share: `buffers` allocates it and exchanges rows through it.

`memory_file` maps files of it, also such as outlive the ranks.
"""
