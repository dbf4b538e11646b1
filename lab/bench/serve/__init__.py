"""Requests served by real vLLM engines, prefilled on one and decoded on another: how long a hand-over takes, and what it costs
the requests beside it, with each connector and against an engine that has nothing to move.

Everything up to `measure` is pure or needs sockets alone; vLLM is needed in the processes that `lab.fleet` starts.
"""
