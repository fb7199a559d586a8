"""The life of a process: what it knows of its run, supervision of local ranks, signals, the
watchdog, the outcome."""
