"""`torsh run --ssh`: one launcher on each host through the system's ssh.

Read `remote_job`, then `host_start`, which runs on the hosts.
"""
