"""HTTP: one file for each concept. Knows bodies, statuses and owners; decides nothing else."""
