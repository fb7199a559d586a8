"""What is wrong with a run, by the numbers of its steps. Pure; needs no Prometheus and no torch."""
