"""Starting Horovod jobs: `function_run` is `horovod.run`, `horovodrun_line` reads the arguments of `horovodrun`."""
