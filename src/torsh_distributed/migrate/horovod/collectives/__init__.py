"""Horovod's operations as scripts call them: `submission` hands them to the engine, the others are thin over it.

Names end in `_async` (return a handle), `_` (in place), `_async_` (both).
"""
