"""Stands in for vllm-router where processes are tested."""
