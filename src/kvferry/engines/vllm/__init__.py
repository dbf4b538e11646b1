"""The vLLM adapter: the manifest of a worker's cache tensors."""

from kvferry.engines.vllm.layouts import CERTIFICATES, Certificate, certified
from kvferry.engines.vllm.manifest import manifest_of

__all__ = ["CERTIFICATES", "Certificate", "certified", "manifest_of"]
