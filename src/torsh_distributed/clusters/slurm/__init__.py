"""`torsh submit --to slurm`: a batch script whose ranks are tasks of srun.

`slurm_script` writes it, `slurm_engine` submits it and reads what SLURM says about jobs.
"""
