"""The launchers of a job's nodes: `coordinator` decides, `leader` distributes, `node` acts, `follower` connects a node
to the leader; then `records` and `launcher_connection`, what they exchange."""
