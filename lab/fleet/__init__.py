"""Real vLLM servers for measuring and testing: started quickly, asked over HTTP, ended without a trace.

`python -m lab bench serve` and the tests on real engines share it. Its engines are patched: `patches` says how.
"""
