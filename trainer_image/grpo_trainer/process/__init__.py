"""The life of a process: supervision of local ranks, signals, the watchdog and the outcome it leaves."""
