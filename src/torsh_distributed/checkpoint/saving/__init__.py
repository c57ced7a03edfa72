"""How a checkpoint is written: `box_assignment` says who writes what, `file_image` copies it,
`checkpoint_writer` stores it in the background, `checkpoint_commit` publishes it, `checkpoint_uploads` sends it on."""
