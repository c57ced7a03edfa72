"""Training that survives lost ranks and takes in new ones. Read `in_place`, then `membership_client` (what the launcher
says), `epoch_world` (a new world) and `state_transfer`."""
