"""Real vLLM servers for measuring and testing: started quickly, asked over HTTP, ended without a trace.

Nothing here is needed to serve; `python -m lab bench serve` and the tests on real engines share it.
"""
