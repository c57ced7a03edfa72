"""Our parts beside torch's, both in one run: `torsh bench p2p`, ddp, fsdp, pipeline, store, checkpoint, monitor.

In which order to read: `side_by_side` measures in turns, `rows_table` shows, `contest` starts the ranks; then a file
for each command. `training_steps` is what ddp and fsdp train.
"""
