"""The store behind a port: `tcp_protocol` (what travels), `tcp_client`, `store_loop` and `tcp_server`.

`store_loop` serves connections, `store_requests` does what they ask for; neither imports torch: the launcher's store
process runs them. `tcp_server` also forwards clients that know only torch.
"""
