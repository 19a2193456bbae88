"""Load clients for the installed program; `python -m benchmarks --help`."""
