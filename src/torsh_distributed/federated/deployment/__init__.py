"""Rounds with real devices over TLS: `round_server` asks them, `device_client` is one of them.

`serve` runs the server. `device_identity` has their keys, `enrolment` the server's list of devices, `device_messages`
what they say.
"""
