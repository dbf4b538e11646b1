"""Stands in for vLLM where processes are tested, and not what they compute."""
