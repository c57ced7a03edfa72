"""Connections between the processes of a job: proved by its secret, framed, and signed or encrypted beyond a machine.

`frames` is the format; `connection` is for a thread that waits, `frame_stream` for an event loop; `proof` opens both.
`packets` reads from a Unix socket that keeps messages whole.
Imports no torch: launchers use it too.
"""
