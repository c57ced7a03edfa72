"""`torsh run --mpi`: workers that are one MPI job, through a PMI server in the launcher."""
