"""Who belongs to a job: its `job_secret`, the `handshake` that proves it, and what strangers get (`stranger_pool`).

Imports no torch: launchers use it too.
"""
