"""Reports of runs: one HTML page that shows what a run's folder holds, alone or beside another run's."""
