"""Starting Horovod jobs: `function_run` is `horovod.run`, `command_line` reads the arguments of `horovodrun`."""
