"""Ranks inside processes that an engine started: Ray's actors, Dask's workers.

Read `rank_host` (what an engine offers), then `hosted_job` (how ranks become a job), then `rank_run` (what happens in
the engine's process).
"""
