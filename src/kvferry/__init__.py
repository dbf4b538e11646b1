"""KVFerry: carries a request's cache from prefill to decode workers, and proves it."""
