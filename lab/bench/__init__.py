"""Benchmarks against named baselines, measured in turn in the same run: preparing, moving, binding.

Needs NumPy and msgspec, and NIXL where bytes move; the command line around it is `lab.cli.bench`.
"""
