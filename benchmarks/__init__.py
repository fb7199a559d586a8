"""Measurements for people, with tables on standard output. `python -m benchmarks` lists them and
runs one."""
