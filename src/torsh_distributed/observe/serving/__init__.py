"""Serving a job's metrics from a process beside the launcher: `observer_process` starts it, `observer` is it.

`guarded_server` is the HTTP server, hardened; `page_server` and `metrics_server` say what it serves.
"""
