"""Command lines of other launchers as lines of `torsh run`: `launch_command` finds out whose it is.

`line_draft` is what every reader fills; `accelerate_options` is a table;
`accelerate_config` reads Accelerate's YAML. None imports torch.
"""
