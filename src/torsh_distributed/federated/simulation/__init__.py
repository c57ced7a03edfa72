"""Virtual clients on this machine: `simulate` runs rounds with them, `virtual_clients` trains them, in this process or
in several (`client_processes`)."""
