"""Starting and supervising the processes of a job.

`job.launch_job(spec.JobSpec(...))` is what `torsh run` calls; `environment` is the workers' side of it.
Importing this package loads neither.
"""
