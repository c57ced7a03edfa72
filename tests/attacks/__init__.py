"""Attempts to read, write, join, end or delay jobs, made by another user and from another host against our jobs."""
