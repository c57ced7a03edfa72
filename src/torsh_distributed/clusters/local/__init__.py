"""Jobs in the background of this machine, for engines that are not services: SSH and MPI."""
