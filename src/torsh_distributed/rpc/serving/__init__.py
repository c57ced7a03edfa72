"""The callee's side: `exposed` says what may be called, `call_server` reads calls, `served_call` is one of them."""
