"""`torsh render`: scripts and files for people to read, keep and run; nothing here is submitted by us.

`rendered_files` has them by name. Each is a pure function from a `Submission` to named texts.
"""
