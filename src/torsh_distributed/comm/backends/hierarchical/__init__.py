"""The `torsh` backend: shared memory inside each node, gloo between nodes, or MPI or TLS if asked.

Read `nodes`, `wire`, `inter_node`, then `group`, which puts them together.
"""

from torsh_distributed.comm.backends.hierarchical.group import TorshOptions, create_torsh_group

__all__ = ["TorshOptions", "create_torsh_group"]
