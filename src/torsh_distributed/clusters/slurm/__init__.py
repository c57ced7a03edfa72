"""`torsh submit --to slurm`: a batch script whose ranks are tasks of srun.

`slurm_script` writes it, `slurm_queue` reads what SLURM says about jobs, `slurm_engine` is the engine.
"""
