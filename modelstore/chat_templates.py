"""Chat templates by name, for models whose files have none: the formats that families of models were trained on.

Plain data. Source: the formats as their makers document them. A template of the model's own counts before these, unless the
user asks for one.
"""

from __future__ import annotations

_CHATML = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
_LLAMA3 = (
    "{{ bos_token }}"
    "{% for message in messages %}"
    "{{ '<|start_header_id|>' + message['role'] + '<|end_header_id|>\n\n' + message['content'] | trim + '<|eot_id|>' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|start_header_id|>assistant<|end_header_id|>\n\n' }}{% endif %}"
)
_PHI3 = (
    "{% for message in messages %}"
    "{{ '<|' + message['role'] + '|>\n' + message['content'] + '<|end|>\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>\n' }}{% endif %}"
)
# For formats without a place for a system message: it goes before the first one of the user.
_SYSTEM_APART = (
    "{% set has_system = messages[0]['role'] == 'system' %}"
    "{% set system = messages[0]['content'] | trim if has_system else '' %}"
    "{% set turns = messages[1:] if has_system else messages %}"
    "{% for message in turns %}"
    "{% if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('after a system message, if there is one, user and assistant must take turns') }}"
    "{% endif %}"
    "{% endfor %}"
    "{{ bos_token }}"
)
_MISTRAL = (
    _SYSTEM_APART + "{% for message in turns %}"
    "{% if message['role'] == 'user' %}"
    "{{ '[INST] ' + (system + '\n\n' if loop.first and has_system else '') + message['content'] | trim + ' [/INST]' }}"
    "{% else %}{{ ' ' + message['content'] | trim + eos_token }}{% endif %}"
    "{% endfor %}"
)
_LLAMA2 = (
    _SYSTEM_APART + "{% for message in turns %}"
    "{% if message['role'] == 'user' %}"
    "{{ ('' if loop.first else bos_token) + '[INST] ' "
    "+ ('<<SYS>>\n' + system + '\n<</SYS>>\n\n' if loop.first and has_system else '') "
    "+ message['content'] | trim + ' [/INST]' }}"
    "{% else %}{{ ' ' + message['content'] | trim + ' ' + eos_token }}{% endif %}"
    "{% endfor %}"
)
_GEMMA = (
    _SYSTEM_APART + "{% for message in turns %}"
    "{{ '<start_of_turn>' + ('user' if message['role'] == 'user' else 'model') + '\n' "
    "+ (system + '\n\n' if loop.first and has_system else '') + message['content'] | trim + '<end_of_turn>\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<start_of_turn>model\n' }}{% endif %}"
)

CHAT_TEMPLATES = {
    "chatml": _CHATML,
    "gemma": _GEMMA,
    "llama2": _LLAMA2,
    "llama3": _LLAMA3,
    "mistral": _MISTRAL,
    "phi3": _PHI3,
}
