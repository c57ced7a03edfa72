"""The launchers of a job's nodes: `coordinator` decides, `leader` distributes, `node` acts, `follower` connects a node
to the leader; `elastic_leader` and its `elastic_world` are for workers that come and go. Then `records` and
`launcher_connection`, what they exchange."""
