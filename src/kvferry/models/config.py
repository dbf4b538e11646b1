"""From a HuggingFace config.json to a model's shape: which keys of each model family say what its layers cache.

Layer names, state dtypes and the readings of ambiguous keys are vLLM's. Knows nothing of topologies and memory orders.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Final

from kvferry.errors import ModelError
from kvferry.manifest.kinds import Attention, Entries, GatedDelta, LatentAttention, LayerKind, Mamba1, Mamba2, ShortConv
from kvferry.manifest.pool import LayerSpec
from kvferry.manifest.schema import FULL, Chunk, Reach, Window
from kvferry.models.fields import MAX_LAYERS, Fields
from kvferry.models.shape import ModelShape

Layers = tuple[tuple[LayerSpec, ...], ...]

MLA_ALIGNMENT: Final = 128
V4_PAGE_ALIGN: Final = 576
V4_QUANTUM: Final = 64
INDEXER_QUANTUM: Final = 128

_REACHES: Final = {"full_attention": "full", "sliding_attention": "sliding", "chunked_attention": "chunked"}
_HYBRID: Final = {
    "mamba": "state",
    "linear_attention": "state",
    "conv": "state",
    "attention": "attention",
    "full_attention": "attention",
    "mlp": "none",
    "moe": "none",
}
_V4_RATES: Final = {"sliding_attention": 0, "compressed_sparse_attention": 4, "heavily_compressed_attention": 128}
_NEMOTRON: Final = {"M": "state", "*": "attention", "-": "none", "E": "none"}


@dataclass(frozen=True)
class _Config:
    """A config's own keys, the path its layers' names start with, and what every family reads alike."""

    keys: Fields
    path: str
    dtype: str

    @cached_property
    def layers(self) -> int:
        return self.keys.count("num_hidden_layers", most=MAX_LAYERS)

    @cached_property
    def given_layers(self) -> int | None:
        """The number of layers where it need not be given, since a list has an item for each."""
        return self.layers if self.keys.has("num_hidden_layers") else None

    @cached_property
    def heads(self) -> int:
        return self.keys.count("num_attention_heads")

    def name(self, index: int, suffix: str) -> str:
        return f"{self.path}.{index}.{suffix}"

    def one_each(self, kinds: Sequence[LayerKind], suffix: str) -> Layers:
        return tuple((LayerSpec(self.name(i, suffix), kind),) for i, kind in enumerate(kinds))

    def hybrid(self, words: Sequence[str], kinds: Mapping[str, tuple[LayerKind, str]]) -> Layers:
        """A layer per word; `kinds` gives each word's kind and name suffix, and a word that is not in it caches nothing."""
        return tuple(
            (LayerSpec(self.name(i, kinds[word][1]), kinds[word][0]),) if word in kinds else () for i, word in enumerate(words)
        )

    def divided_head_dim(self) -> int:
        hidden = self.keys.count("hidden_size")
        if hidden % self.heads:
            raise self.keys.error("hidden_size", f"is {hidden}, no multiple of num_attention_heads {self.heads}; give head_dim")
        return hidden // self.heads

    def attention(self, dim: int | None = None) -> Attention:
        kv_heads = self.keys.count("num_key_value_heads", default=self.heads)
        return Attention(kv_heads, dim or self.keys.count("head_dim"), self.dtype)

    def attention_or_divided(self) -> Attention:
        return self.attention(None if self.keys.has("head_dim") else self.divided_head_dim())

    def reach(self, word: str) -> Reach:
        if word == "sliding":
            return Window(self.keys.count("sliding_window"))
        return Chunk(self.keys.count("attention_chunk_size")) if word == "chunked" else FULL

    def reaching(self, attention: Attention, words: Sequence[str], suffix: str = "self_attn.attn") -> Layers:
        """Attention layers with a reach each; the config's own `layer_types`, where it has them, outrank `words`."""
        if self.keys.has("layer_types"):
            words = self.keys.words("layer_types", self.layers, _REACHES)
        by_word = {word: replace(attention, reach=self.reach(word)) for word in dict.fromkeys(words)}
        return self.one_each([by_word[word] for word in words], suffix)

    def every(self, period: int, common: str, last: str) -> tuple[str, ...]:
        """`common` layers, of which every `period`-th is `last` instead."""
        return tuple(common if (i + 1) % period else last for i in range(self.layers))


def _llama(c: _Config) -> Layers:
    return c.reaching(c.attention_or_divided(), ["full"] * c.layers)


def _mistral(c: _Config) -> Layers:
    return c.reaching(c.attention_or_divided(), ["sliding" if c.keys.has("sliding_window") else "full"] * c.layers)


def _qwen_reaches(c: _Config) -> list[str]:
    if not c.keys.flag("use_sliding_window", default=False):
        return ["full"] * c.layers
    first = c.keys.count("max_window_layers", least=0)
    return ["sliding" if i >= first else "full" for i in range(c.layers)]


def _qwen2(c: _Config) -> Layers:
    return c.reaching(c.attention(c.divided_head_dim()), _qwen_reaches(c))


def _qwen3(c: _Config) -> Layers:
    return c.reaching(c.attention(), _qwen_reaches(c))


def _qwen3_moe(c: _Config) -> Layers:
    if c.keys.flag("use_sliding_window", default=False) and not c.keys.has("layer_types"):
        raise c.keys.error("use_sliding_window", "is true, but which layers slide is not defined; give layer_types")
    return c.reaching(c.attention_or_divided(), ["full"] * c.layers)


def _gemma3(c: _Config) -> Layers:
    return c.reaching(c.attention(), c.every(c.keys.count("sliding_window_pattern"), "sliding", "full"))


def _gpt_oss(c: _Config) -> Layers:
    return c.reaching(c.attention(), c.every(2, "sliding", "full"), "attn.attn")


def _llama4(c: _Config) -> Layers:
    """Layers with rotary positions attend inside a chunk, layers without to everything; an empty list means every 4th."""
    local = "chunked" if c.keys.has("attention_chunk_size") else "full"
    words: Sequence[str] = c.every(c.keys.count("no_rope_layer_interval", default=4), local, "full")
    if c.keys.has("no_rope_layers") and c.keys.items("no_rope_layers"):
        rotary = c.keys.items("no_rope_layers", c.layers)
        if any(r not in (0, 1) for r in rotary):
            raise c.keys.error("no_rope_layers", "holds something else than 0 (no rotary positions) and 1")
        words = [local if r else "full" for r in rotary]
    return c.reaching(c.attention(), words)


def _latent(c: _Config) -> LatentAttention:
    return LatentAttention(c.keys.count("kv_lora_rank"), c.keys.count("qk_rope_head_dim"), dtype=c.dtype)


def _deepseek_v3(c: _Config) -> Layers:
    return c.one_each([_latent(c)] * c.layers, "self_attn.attn")


def _deepseek_v32(c: _Config) -> Layers:
    """The indexer's keys are fp8, with a float32 scale per quantum, in planes of their own cache."""
    latent, indexer = _latent(c), _indexer(c)
    return tuple(
        (LayerSpec(c.name(i, "self_attn.attn"), latent), LayerSpec(c.name(i, "self_attn.indexer.k_cache"), indexer))
        for i in range(c.layers)
    )


def _indexer(c: _Config) -> Entries:
    width = c.keys.count("index_head_dim")
    if width % INDEXER_QUANTUM:
        raise c.keys.error("index_head_dim", f"is {width}; a multiple of {INDEXER_QUANTUM} is needed, which share a scale")
    return Entries("indexer", width, planes=(("indexer.scale", width // INDEXER_QUANTUM * 4),))


def _deepseek_v4(c: _Config) -> Layers:
    """Each layer has a window of raw latents; a compression ratio adds compressed latents and the compressor's state."""
    ratios = c.keys.items("compress_ratios") if c.keys.has("compress_ratios") else _v4_ratios(c)
    if len(ratios) < c.layers:
        raise c.keys.error("compress_ratios", f"has {len(ratios)} items for {c.layers} layers; one per layer is needed")
    dim = c.keys.count("head_dim")
    window = replace(_v4_latent(c, dim), reach=Window(c.keys.count("sliding_window")), block=64)
    layers = []
    for i, ratio in enumerate(ratios[: c.layers]):
        if ratio not in (0, 4, 128) or not isinstance(ratio, int):
            raise c.keys.error(f"compress_ratios[{i}]", f"is {ratio!r:.40}; known are 0, 4 and 128")
        layers.append((LayerSpec(c.name(i, "attn.swa_cache"), window), *_v4_compressed(c, c.name(i, "attn"), ratio, dim)))
    return tuple(layers)


def _v4_ratios(c: _Config) -> list[int]:
    """The ratios as transformers writes them: a kind for each layer, and a rate for each kind."""
    words = c.keys.words("layer_types", c.layers, {word: word for word in _V4_RATES})
    rates = c.keys.section("compress_rates") if c.keys.has("compress_rates") else None
    by_word = {word: rates.count(word, rate, least=0) if rates else rate for word, rate in _V4_RATES.items()}
    return [by_word[word] for word in words]


def _v4_rope(c: _Config, dim: int) -> int:
    """Dims with positions, or, as transformers writes them, their share of all."""
    share = c.keys.values.get("partial_rotary_factor")
    if c.keys.has("qk_rope_head_dim") or not isinstance(share, float) or not 0 < share <= 1:
        return c.keys.count("qk_rope_head_dim")
    return round(dim * share)


def _v4_latent(c: _Config, dim: int) -> Entries:
    """fp8 without positions, bfloat16 with them, then a plane of byte-wide scales, one per quantum, rounded up to 8."""
    rope = _v4_rope(c, dim)
    if rope >= dim or (dim - rope) % V4_QUANTUM:
        raise c.keys.error("qk_rope_head_dim", f"is {rope}, which leaves no multiple of {V4_QUANTUM} of head_dim {dim}")
    scales = -(-(dim - rope) // V4_QUANTUM // 8) * 8
    return Entries("latent", dim + rope, planes=(("latent.scale", scales),), page_align=V4_PAGE_ALIGN)


def _v4_compressed(c: _Config, name: str, ratio: int, dim: int) -> tuple[LayerSpec, ...]:
    """An entry per `ratio` tokens, kept for good, and the raw rows of the tokens that the next entries will pool."""
    if ratio == 0:
        return ()
    latent = LayerSpec(name, replace(_v4_latent(c, dim), tokens_per_entry=ratio, block=256))
    if ratio == 128:
        return latent, LayerSpec(f"{name}.compressor.state_cache", _v4_rows(2 * dim, 128, 8))
    indexer = replace(_indexer(c), tokens_per_entry=4, block=256, page_align=V4_PAGE_ALIGN)
    return (
        latent,
        LayerSpec(f"{name}.indexer.k_cache", indexer),
        LayerSpec(f"{name}.compressor.state_cache", _v4_rows(4 * dim, 8, 4)),
        LayerSpec(f"{name}.indexer.compressor.state_cache", _v4_rows(4 * indexer.width, 8, 4)),
    )


def _v4_rows(width: int, window: int, block: int) -> Entries:
    return Entries("state", width, dtype="float32", reach=Window(window), block=block, page_align=V4_PAGE_ALIGN)


def _mamba2(c: _Config, inner: int | None = None) -> Mamba2:
    """Mamba2 as Granite, Bamba and Falcon spell it; `inner` channels must be what the heads make."""
    heads = c.keys.count("mamba_n_heads")
    inner = inner or c.keys.count("mamba_expand", default=2) * c.keys.count("hidden_size")
    dim = inner // heads if c.keys.values.get("mamba_d_head") in (None, "auto") else c.keys.count("mamba_d_head")
    if heads * dim != inner:
        raise c.keys.error("mamba_d_head", f"is {dim}, but {heads} Mamba2 heads of it do not make the {inner} inner channels")
    return Mamba2(
        heads,
        dim,
        c.keys.count("mamba_d_state"),
        c.keys.count("mamba_n_groups", default=1),
        c.keys.count("mamba_d_conv", default=4, least=2),
        c.dtype,
        c.dtype,
    )


def _nemotron_h(c: _Config) -> Layers:
    """The ssm state is float32 unless the config says otherwise."""
    keys = c.keys
    if keys.has("hybrid_override_pattern"):
        pattern = keys.text("hybrid_override_pattern")
        spelled = Fields({"hybrid_override_pattern": list(pattern[: MAX_LAYERS + 1])}, keys.model, keys.at)
        words = spelled.words("hybrid_override_pattern", c.given_layers, _NEMOTRON)
    else:
        words = keys.words("layers_block_type", c.given_layers, _HYBRID)
    attention = c.attention(keys.count("attention_head_dim") if keys.has("attention_head_dim") else None)
    if keys.has("sliding_window"):
        attention = replace(attention, reach=c.reach("sliding"))
    mamba = Mamba2(
        keys.count("mamba_num_heads"),
        keys.count("mamba_head_dim"),
        keys.count("ssm_state_size"),
        keys.count("n_groups"),
        keys.count("conv_kernel", least=2),
        c.dtype,
        keys.dtype("mamba_ssm_cache_dtype", default="float32"),
    )
    return c.hybrid(words, {"state": (mamba, "mixer"), "attention": (attention, "mixer.attn")})


def _granite_hybrid(c: _Config) -> Layers:
    words = c.keys.words("layer_types", c.layers, _HYBRID)
    attention = c.attention(c.divided_head_dim())
    return c.hybrid(words, {"state": (_mamba2(c), "mixer"), "attention": (attention, "self_attn.attn")})


def _bamba(c: _Config) -> Layers:
    chosen = c.keys.indices("attn_layer_indices", c.layers) if c.keys.has("attn_layer_indices") else ()
    words = ["attention" if i in chosen else "state" for i in range(c.layers)]
    return c.hybrid(words, {"state": (_mamba2(c), "mixer"), "attention": (c.attention(c.divided_head_dim()), "attn")})


def _falcon_h1(c: _Config) -> Layers:
    """Attention beside Mamba2 in every layer; the engine counts the Mamba2 half on from the last layer."""
    mamba = _mamba2(c, c.keys.count("mamba_d_ssm") if c.keys.has("mamba_d_ssm") else None)
    attention = c.attention_or_divided()
    root = c.path.removesuffix(".layers")
    return tuple(
        (LayerSpec(c.name(i, "attn"), attention), LayerSpec(f"{root}.{c.layers + i}.mixer", mamba)) for i in range(c.layers)
    )


def _jamba(c: _Config) -> Layers:
    period = c.keys.count("attn_layer_period")
    offset = c.keys.count("attn_layer_offset", least=0)
    words = ["attention" if i % period == offset else "state" for i in range(c.layers)]
    channels = c.keys.count("mamba_expand") * c.keys.count("hidden_size")
    mamba = Mamba1(channels, c.keys.count("mamba_d_state"), c.keys.count("mamba_d_conv", default=4, least=2), c.dtype, c.dtype)
    return c.hybrid(words, {"state": (mamba, "mixer"), "attention": (c.attention(c.divided_head_dim()), "attn")})


def _qwen3_next(c: _Config, ssm_dtype: str = "") -> Layers:
    words: Sequence[str]
    if c.keys.has("layer_types"):
        words = c.keys.words("layer_types", c.layers, _HYBRID)
    else:
        words = c.every(c.keys.count("full_attention_interval", default=4), "state", "attention")
    delta = GatedDelta(
        c.keys.count("linear_num_key_heads"),
        c.keys.count("linear_num_value_heads"),
        c.keys.count("linear_key_head_dim"),
        c.keys.count("linear_value_head_dim"),
        c.keys.count("linear_conv_kernel_dim", least=2),
        c.dtype,
        ssm_dtype or c.dtype,
    )
    return c.hybrid(words, {"state": (delta, "linear_attn"), "attention": (c.attention(), "self_attn.attn")})


def _qwen3_5(c: _Config) -> Layers:
    return _qwen3_next(c, c.keys.dtype("mamba_ssm_dtype", default=c.dtype))


def _kimi_linear(c: _Config) -> Layers:
    """Layer lists count from 1. The state is float32, whatever the model's dtype."""
    if not c.keys.has("linear_attn_config"):
        return _kimi_linear_by_words(c)
    linear = c.keys.section("linear_attn_config")
    full, delta = (linear.indices(key, c.layers, base=1) for key in ("full_attn_layers", "kda_layers"))
    if full & delta or len(full | delta) != c.layers:
        raise linear.error("kda_layers", f"and full_attn_layers must name each of the {c.layers} layers once, counted from 1")
    heads, dim = linear.count("num_heads"), linear.count("head_dim")
    kda = GatedDelta(heads, heads, dim, dim, linear.count("short_conv_kernel_size", least=2), c.dtype, "float32")
    latent = _latent(c)
    return c.one_each([latent if i in full else kda for i in range(c.layers)], "self_attn")


def _kimi_linear_by_words(c: _Config) -> Layers:
    """As transformers writes it: a word for each layer, and keys of the linear layers beside all others."""
    heads, dim = c.keys.count("linear_num_heads"), c.keys.count("linear_head_dim")
    kda = GatedDelta(heads, heads, dim, dim, c.keys.count("linear_conv_kernel_dim", least=2), c.dtype, "float32")
    words = c.keys.words("layer_types", c.layers, _HYBRID)
    return c.hybrid(words, {"state": (kda, "self_attn"), "attention": (_latent(c), "self_attn")})


def _lfm2(c: _Config) -> Layers:
    words: Sequence[str]
    if c.keys.has("layer_types"):
        words = c.keys.words("layer_types", c.layers, _HYBRID)
    else:
        chosen = c.keys.indices("full_attn_idxs", c.layers)
        words = ["attention" if i in chosen else "state" for i in range(c.layers)]
    channels = c.keys.count("conv_dim" if c.keys.has("conv_dim") else "hidden_size")
    conv = ShortConv(channels, c.keys.count("conv_L_cache", least=2), c.dtype)
    attention = c.attention(c.divided_head_dim())
    return c.hybrid(words, {"state": (conv, "short_conv"), "attention": (attention, "self_attn.attn")})


_FAMILIES: Final[Mapping[str, Callable[[_Config], Layers]]] = {
    "bamba": _bamba,
    "deepseek_v2": _deepseek_v3,
    "deepseek_v3": _deepseek_v3,
    "deepseek_v32": _deepseek_v32,
    "deepseek_v4": _deepseek_v4,
    "falcon_h1": _falcon_h1,
    "gemma3": _gemma3,
    "gemma3_text": _gemma3,
    "gpt_oss": _gpt_oss,
    "granitemoehybrid": _granite_hybrid,
    "jamba": _jamba,
    "kimi_linear": _kimi_linear,
    "lfm2": _lfm2,
    "llama": _llama,
    "llama4": _llama4,
    "llama4_text": _llama4,
    "mistral": _mistral,
    "nemotron_h": _nemotron_h,
    "qwen2": _qwen2,
    "qwen3": _qwen3,
    "qwen3_5": _qwen3_5,
    "qwen3_5_text": _qwen3_5,
    "qwen3_moe": _qwen3_moe,
    "qwen3_next": _qwen3_next,
}
_GEMMA3: Final = {"num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 256, "sliding_window_pattern": 6}
_LEFT_OUT: Final = {"gemma3": _GEMMA3, "gemma3_text": _GEMMA3}
"""Keys that published files leave out where they equal the defaults of transformers."""
_LATENT: Final = frozenset(("deepseek_v2", "deepseek_v3", "deepseek_v32", "deepseek_v4", "kimi_linear"))


def model_types() -> tuple[str, ...]:
    """The values of `model_type` that `from_config` reads."""
    return tuple(sorted(_FAMILIES))


def from_config(config: Mapping[str, object], name: str, dtype: str = "") -> ModelShape:
    """The shape that a config.json describes; a multimodal config is read through its `text_config`. `dtype` is what an engine
    is told to compute in, where that is not the config's."""
    if not isinstance(config, Mapping):
        raise ModelError(f"{name}: the config is a {type(config).__name__}; an object with keys is needed")
    outer = keys = Fields(config, name)
    path = "model.layers"
    if outer.has("text_config"):
        keys, path = outer.section("text_config"), "language_model.model.layers"
    family = _family(keys, outer)
    for found in {id(some): some for some in (outer, keys)}.values():
        _refuse_encoders(found)
    own = keys.dtype("torch_dtype", "dtype", default=outer.dtype("torch_dtype", "dtype", default="bfloat16"))
    given = {key: value for key, value in keys.values.items() if value is not None}
    c = _Config(replace(keys, values={**_LEFT_OUT.get(family, {}), **given}), path, dtype or own)
    layers = _FAMILIES[family](c)
    if not any(layers):
        raise ModelError(f"{name}: none of its {len(layers)} layers caches anything, so there is nothing to transfer")
    alignment = MLA_ALIGNMENT if family in _LATENT else 16
    return ModelShape(name, layers, outer.text("_source", default="its config.json"), alignment, c.heads)


def _refuse_encoders(keys: Fields) -> None:
    """Layers that attend to an encoder cache as many tokens as its output has, which a request's tokens do not count."""
    for key in ("is_encoder_decoder", "add_cross_attention"):
        if keys.flag(key, default=False):
            raise keys.error(
                key, "is true: a cache as long as an encoder's output is not supported, only decoder-only models are"
            )
    if keys.has("cross_attention_layers") and keys.items("cross_attention_layers"):
        raise keys.error("cross_attention_layers", "names layers that cache an encoder's output, which is not supported")


def _family(keys: Fields, outer: Fields) -> str:
    named = [f.text("model_type") for f in (keys, outer) if f.has("model_type")] or [outer.text("model_type")]
    for model_type in named:
        if model_type in _FAMILIES:
            return model_type
    near = difflib.get_close_matches(named[0][:64], _FAMILIES, 1)
    hint = f"did you mean {near[0]}? " if near else ""
    raise outer.error("model_type", f"is {named[0]!r:.80}, which is not known; {hint}known are {', '.join(_FAMILIES)}")
