"""Benchmarks and the makers of what ships with the project. Each is run as `python -m bench.NAME`."""
