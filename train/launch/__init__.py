"""`python -m train launch`: ranks on this machine, without the library; run.sbatch: on several, under Slurm."""
