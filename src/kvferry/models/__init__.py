"""Models and sides: what a model caches, how an engine splits it over ranks, and the manifests that follow."""

from kvferry.models.config import from_config, model_types
from kvferry.models.shape import ModelShape
from kvferry.models.side import Side
from kvferry.models.topology import block_tokens, engine_groups, legal, manifests, stages
from kvferry.models.zoo import load_model, read_config, zoo_config, zoo_names

__all__ = [
    "ModelShape",
    "Side",
    "block_tokens",
    "engine_groups",
    "from_config",
    "legal",
    "load_model",
    "manifests",
    "model_types",
    "read_config",
    "stages",
    "zoo_config",
    "zoo_names",
]
