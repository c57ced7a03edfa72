"""The control plane that the launcher hosts: who is in the world (`membership`), how each worker is (`worker_health`),
the warm spare that new workers are forked from (`spare_process`), and commands of the user (`job_commands`)."""
