"""Copies of the ranks' state in other ranks' memory: `neighbour_replicas` makes them, `recovery` restores from them.

`neighbours` says who keeps whose, `snapshot_shelf` holds them, `snapshot_server` moves them.
"""
