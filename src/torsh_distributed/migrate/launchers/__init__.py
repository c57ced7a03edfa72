"""Command lines of other launchers as lines of `torsh run`: `launch_command` finds out whose it is.

`line_draft` is what every reader fills; `torchrun_options`, `mpirun_options` and `accelerate_options` are the tables;
`accelerate_config` reads Accelerate's YAML. None imports torch.
"""
