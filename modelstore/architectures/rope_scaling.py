"""How headers state that rotary frequencies were stretched for a longer context.

Reads both formats into one `RopeScaling`; `modelstore.rope` computes with it. A kind that is not known is refused by name.
"""

from __future__ import annotations

import math

from modelstore.architectures.fields import MAX_CONTEXT_TOKENS, Fields
from modelstore.manifest import RopeScaling
from shoal.errors import BadModelFile, UnsupportedModel

PLAIN = RopeScaling()
# Source: the YaRN paper (arXiv 2309.00071), 3.2 and 3.4: where ramps begin and end, and how much attention is sharpened.
YARN_BETA_FAST, YARN_BETA_SLOW = 32.0, 1.0
HF_KINDS = ("linear", "llama3", "yarn", "default")


def scaling_of_gguf(fields: Fields, *, has_factors: bool) -> RopeScaling:
    """has_factors: whether there is a tensor of factors, which then says all; raises UnsupportedModel."""
    kind = fields.find("rope.scaling.type", str, "none")
    fields.require_one_of("rope.scaling.type", ("none", "linear", "yarn"), "none")
    if has_factors:
        return RopeScaling("factors")
    # Files of old writers have the factor alone, and it means linear.
    factor = fields.positive("rope.scaling.factor", fields.positive("rope.scale_linear", 1.0))
    if kind == "yarn":
        original = fields.count("rope.scaling.original_context_length", MAX_CONTEXT_TOKENS)
        slow = fields.positive("rope.scaling.yarn_beta_slow", YARN_BETA_SLOW)
        fast = fields.positive("rope.scaling.yarn_beta_fast", YARN_BETA_FAST)
        return _yarn(factor, original, slow, fast, 0.0)
    is_linear = factor != 1.0 and (kind == "linear" or "rope.scaling.type" not in fields)
    return RopeScaling("linear", factor) if is_linear else PLAIN


def scaling_of_hf(fields: Fields, context_tokens: int) -> RopeScaling:
    """Of the mapping rope_scaling or rope_parameters; raises UnsupportedModel for a kind that is not known."""
    name = "rope_type" if "rope_type" in fields else "type"
    fields.require_one_of(name, HF_KINDS, "default")
    kind = fields.find(name, str, "default")
    if kind == "default":
        return PLAIN
    factor = fields.positive("factor")
    if kind == "linear":
        return RopeScaling("linear", factor)
    original = fields.count("original_max_position_embeddings", MAX_CONTEXT_TOKENS, context_tokens)
    if kind == "llama3":
        low, high = fields.positive("low_freq_factor"), fields.positive("high_freq_factor")
        if high <= low:
            raise BadModelFile(f"{fields.label('high_freq_factor')} is {high}; it must be above low_freq_factor, {low}")
        return RopeScaling("llama3", factor, original, low, high)
    for name in ("mscale", "mscale_all_dim"):
        if name in fields:
            raise UnsupportedModel(f"{fields.label(name)} is not supported")
    slow, fast = fields.positive("beta_slow", YARN_BETA_SLOW), fields.positive("beta_fast", YARN_BETA_FAST)
    return _yarn(factor, original, slow, fast, fields.positive("attention_factor", 0.0))


def _yarn(factor: float, original: int, slow: float, fast: float, magnitude: float) -> RopeScaling:
    """magnitude: 0 for what the paper recommends."""
    recommended = 0.1 * math.log(factor) + 1 if factor > 1 else 1.0
    return RopeScaling("yarn", factor, original, slow, fast, magnitude or recommended)
