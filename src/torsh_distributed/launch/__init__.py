"""Starting and supervising the processes of a job."""
