"""Requests carried between real vLLM engines, with vLLM's own connector and with ours, and what came of it."""
