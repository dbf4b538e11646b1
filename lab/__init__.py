"""What measures KVFerry and tries to break it: benchmarks, patched engines, runs side by side, loads spoiled on purpose.

It is in the repository and in no wheel. `python -m lab` in the repository has its commands; the product never imports it.
"""
