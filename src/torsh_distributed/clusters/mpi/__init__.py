"""`torsh submit --to mpi`: ranks started by mpiexec. `mpi_command` writes its line, `mpi_engine` is the engine."""
