"""A checkpoint of our own, so that everything can be seen working where there is no model: tiny, random, and with a tokenizer.

Any text can be asked; what it answers are words of the harbour in no sensible order. Needs transformers, as vLLM does.
"""

from __future__ import annotations

import sys
from importlib.resources import files
from pathlib import Path
from typing import Any, Final

from kvferry.up.checkpoints import write

NAME: Final = "tiny"
DTYPE: Final = "float32"
BEGIN: Final = "<|begin|>"
END: Final = "<|end|>"
CHAT: Final = (
    "{% for message in messages %}" + BEGIN + "{{ message['role'] }}\n{{ message['content'] }}" + END + "\n{% endfor %}"
    "{% if add_generation_prompt %}" + BEGIN + "assistant\n{% endif %}"
)
WORDS: Final = tuple(files("kvferry.up").joinpath("words.txt").read_text("utf-8").split())

CONFIG: Final[dict[str, Any]] = {
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "head_dim": 32,
    "max_position_embeddings": 2048,
    "tie_word_embeddings": False,
    "bos_token_id": None,
}
QUIET: Final = 0.1
"""How much of an output weight a token has that is no word."""


def flags(cpu: bool) -> tuple[str, ...]:
    """What vLLM needs to be told for it, and what spares it work."""
    compact = '--structured-outputs-config={"backend": "xgrammar", "disable_any_whitespace": true}'
    everywhere = (f"--dtype={DTYPE}", "--max-model-len=1024", "--max-num-seqs=32", compact)
    return (*everywhere, "--kv-cache-memory-bytes=134217728", "--enforce-eager") if cpu else everywhere


VARIABLES: Final = {
    "VLLM_CPU_CI_ENV": "1",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "TORCHDYNAMO_DISABLE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "HF_HUB_OFFLINE": "1",
    "GLOO_SOCKET_IFNAME": "lo",
    "VLLM_HOST_IP": "127.0.0.1",
}
"""A tiny engine on a CPU: one process, nothing compiled, nobody asked."""


def make(folder: Path) -> None:
    import tokenizers
    import transformers
    from tokenizers import decoders, models, pre_tokenizers

    bytes_first = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {token: index for index, token in enumerate([*bytes_first, *(f"Ġ{word}" for word in WORDS)])}
    spelled = tokenizers.Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    spelled.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    spelled.decoder = decoders.ByteLevel()
    tokenizer = transformers.PreTrainedTokenizerFast(
        tokenizer_object=spelled, eos_token=END, additional_special_tokens=[BEGIN], clean_up_tokenization_spaces=False
    )
    tokenizer.chat_template = CHAT
    tokenizer.save_pretrained(folder)
    config = transformers.LlamaConfig(
        **CONFIG, vocab_size=len(tokenizer), eos_token_id=tokenizer.eos_token_id, architectures=["LlamaForCausalLM"]
    )
    first = len(bytes_first)

    def answers_in_words(model: Any) -> None:
        spoken = model.lm_head.weight
        spoken[:first] *= QUIET
        spoken[first + len(WORDS) :] *= QUIET

    write(config, DTYPE, folder, answers_in_words)


if __name__ == "__main__":
    Path(sys.argv[1]).mkdir(parents=True, exist_ok=True)
    make(Path(sys.argv[1]))
