"""The whole job, from the summaries of its ranks: `job_view` holds it, `page_state` shows it.

`run_files` builds the same view from the files of a finished run.
"""
