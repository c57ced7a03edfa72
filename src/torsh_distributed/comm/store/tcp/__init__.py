"""The store behind a port: `tcp_protocol` (what travels), `tcp_client`, `store_loop` (the server) and `tcp_server`.

`store_loop` imports no torch: the launcher's store process runs it. `tcp_server` also
forwards clients that know only torch.
"""
