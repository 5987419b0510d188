"""Parallel-R1 (arXiv 2509.07980): the method. Knows nothing of Prefect; imports in both environments."""
