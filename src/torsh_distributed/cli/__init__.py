"""The `torsh` command: `app` lists the commands, each a module or a folder here."""
