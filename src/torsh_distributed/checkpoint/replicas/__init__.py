"""Copies of the ranks' state in other ranks' memory: `neighbour_replicas` makes them, `recovery` restores from them.

`neighbour_replicas` says who keeps whose, `snapshot_memory` holds them, `snapshot_server` moves them.
"""
