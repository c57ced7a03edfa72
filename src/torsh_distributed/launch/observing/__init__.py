"""The launcher passes what its workers measure to the process that observes the job."""
