"""Stage programs: each is started as a process of its own in the worker environment, with one job file (`parallel_r1/jobs.py`)."""
