"""The caller's side: `link` is a connection to a callee, `remote_future` a call under way."""
