"""Jobs in the background of this machine, for engines that are no service: SSH and MPI."""
