"""Rounds with real devices over TLS: `round_server` asks them, `device_client` is one of them.

`serve` runs the server, `tier_server` one that is itself a device of another. `identity` has who they are,
`device_messages` what they say, `device_heartbeat` how each end notices that the other is gone, `entry` how they come
together.
"""
