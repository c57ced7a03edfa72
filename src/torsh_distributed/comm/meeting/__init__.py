"""How ranks meet in a store.

Read `store_meeting` (the mechanism), `rendezvous` (a world comes up), `node_identity` (which ranks share a node),
`network_interface` (on which interface they reach each other), `monitored_barrier` (who is missing after a failure).
"""
