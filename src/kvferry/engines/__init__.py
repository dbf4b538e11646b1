"""Adapters: what an engine's own objects say of its cache memory, in the words of a manifest."""
