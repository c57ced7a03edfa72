"""How a checkpoint is read: `restoring` chooses one that is whole and fits, `saved_checkpoint` reads its files,
`saved_snapshot` is the state of one step, wherever its bytes are."""
