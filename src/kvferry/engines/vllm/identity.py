"""Which model an engine serves, as a short text that is equal on both sides of a pair and on no others."""

from __future__ import annotations

import hashlib
import json
from typing import Any, Final

VOLATILE: Final = frozenset({"_name_or_path", "transformers_version", "architectures", "dtype", "torch_dtype"})


def fingerprint(config: Any) -> str:
    """The model's class and a digest of its configuration; weights of one configuration look alike."""
    model = config.model_config
    said = model.hf_config.to_dict()
    kept = {name: value for name, value in said.items() if name not in VOLATILE}
    text = json.dumps(kept, sort_keys=True, default=str)
    names = "+".join(getattr(model.hf_config, "architectures", None) or ["model"])
    return f"{names[:160]}:{hashlib.sha256(text.encode()).hexdigest()[:16]}"
