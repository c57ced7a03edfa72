"""Horovod's operations as scripts call them: `operation_submission` gives them to the engine, the rest is thin.

Names end in `_async` (return a handle), `_` (in place), `_async_` (both).
"""
