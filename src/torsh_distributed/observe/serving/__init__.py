"""Serving a job's metrics from a process beside the launcher: `observer_process` starts it, `observer` is it.

`guarded_server` is the HTTP server, hardened; the observer says what it serves.
"""
