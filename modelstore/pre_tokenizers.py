"""How byte-level BPE tokenizers cut text into words, by the names that GGUF files use.

Plain data: the readers of tokenizers look a name up, or find the one whose cutting a tokenizer.json spells out; the
tokenizer builds it. Source: llama.cpp's table of names, and the patterns of the tokenizer.json each stands for.
"""

from __future__ import annotations

from modelstore.manifest import Splitting

# Source: encoder.py of GPT-2.
GPT2_PATTERN = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
DIGIT_PATTERN = r"\p{N}"

_SUFFIXES = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_SPACES = r"\s*[\r\n]+|\s+(?!\S)|\s+"


def _plain_words(digits: str) -> str:
    return rf"{_SUFFIXES}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|{digits}| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*|{_SPACES}"


def _cased_words(suffixes: str, digits: str) -> str:
    """Words that begin anew where capitals follow small letters."""
    lead, upper, lower = r"[^\r\n\p{L}\p{N}]?", r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
    words = rf"{lead}{upper}*{lower}+{suffixes}|{lead}{upper}+{lower}*{suffixes}"
    return rf"{words}|{digits}| ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*|{_SPACES}"


_QWEN_PATTERN = _plain_words(r"\p{N}")
_LLAMA3_PATTERN = _plain_words(r"\p{N}{1,3}")
_GPT2 = Splitting((GPT2_PATTERN,))
_SINGLE_DIGITS = Splitting((DIGIT_PATTERN, GPT2_PATTERN))
_LLAMA3 = Splitting((_LLAMA3_PATTERN,), whole_words=True)
_LLAMA3_MERGED = Splitting((_LLAMA3_PATTERN,))

# Of several names for one splitting the first is the one that a tokenizer.json gets.
PRE_TOKENIZERS: dict[str, Splitting] = {
    "gpt-2": _GPT2,
    "default": _GPT2,
    "smollm": _SINGLE_DIGITS,
    "starcoder": _SINGLE_DIGITS,
    "refact": _SINGLE_DIGITS,
    "llama-bpe": _LLAMA3,
    "llama3": _LLAMA3,
    "llama-v3": _LLAMA3,
    "falcon3": _LLAMA3,
    "dbrx": _LLAMA3_MERGED,
    "smaug-bpe": _LLAMA3_MERGED,
    # Trained on composed text, as its tokenizer.json says; llama.cpp leaves text as it is.
    "qwen2": Splitting((_QWEN_PATTERN,), is_nfc=True),
    "deepseek-r1-qwen": Splitting((_QWEN_PATTERN,)),
    "tekken": Splitting((_cased_words("", r"\p{N}"),), whole_words=True),
    "gpt-4o": Splitting((_cased_words(f"{_SUFFIXES}?", r"\p{N}{1,3}"),)),
}
# Splittings of models that want the begin token even where a file does not say so.
BEGIN_TOKEN_FAMILIES = frozenset({"llama-bpe", "llama3", "llama-v3", "falcon3", "tekken"})


def name_of(splitting: Splitting) -> str | None:
    """The name of a splitting, if it has one."""
    return next((name for name, known in PRE_TOKENIZERS.items() if known == splitting), None)
