"""Scripts of other libraries, read and not run: `script_check` lists their calls, `script_changes` proposes a diff."""
