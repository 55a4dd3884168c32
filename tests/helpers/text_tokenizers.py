"""Folders of small tokenizers, trained on a few lines, with chat templates in four styles; codes of items."""

import json

import numpy as np
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from rayrec.models.tokenizers.registry import SemanticIdRegistry

LINES = [
    "You are helpful.",
    "What is the capital of France?",
    "Paris, of course!",
    "user assistant system",
    "Ünï 東京 🙂",
]

CHATML = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
LLAMA = """{{- bos_token }}
{%- if messages[0]['role'] == 'system' %}
    {%- set system_message = messages[0]['content']|trim %}
    {%- set messages = messages[1:] %}
{%- else %}
    {%- set system_message = "" %}
{%- endif %}
{%- if strftime_now is defined %}
    {%- set date = strftime_now("%d %b %Y") %}
{%- else %}
    {%- set date = "26 Jul 2024" %}
{%- endif %}
{{- "<|im_start|>system\\n\\nToday: " + date + "\\n" + system_message + "<|im_end|>" }}
{%- for message in messages %}
    {{- '<|im_start|>' + message['role'] + '\\n\\n' + message['content'] | trim + '<|im_end|>' }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n\\n' }}
{%- endif %}
"""
STRIPS = """{% for message in messages %}
{% if message.role == 'assistant' and not loop.last %}
{{ '[A]' ~ message.content.split('</think>')[-1].strip() ~ '[/A]' }}
{% elif message.role == 'assistant' %}
{{ '[A]' ~ message.content ~ '[/A]' }}
{% else %}
{{ '[' ~ message.role[0]|upper ~ ']' ~ message.content.strip() }}
{% endif %}
{% endfor %}
{% if add_generation_prompt %}{{ '[A]' }}{% endif %}"""
NO_SYSTEM = """{{ bos_token }}
{% if messages[0]['role'] == 'system' %}{{ raise_exception('System role not supported') }}{% endif %}
{% for message in messages %}
{% if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}
{{ raise_exception('Roles must alternate') }}
{% endif %}
{% set role = 'model' if message['role'] == 'assistant' else message['role'] %}
{{ '<start_of_turn>' + role + '\n' + message['content'] | trim + '<end_of_turn>\n' }}{% endfor %}
{% if add_generation_prompt %}{{ '<start_of_turn>model\n' }}{% endif %}"""
THINKS = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' }}"
    "{% if message['role'] == 'assistant' and loop.last %}{{ '<think>\n\n</think>\n\n' }}{% endif %}"
    "{{ message['content'] + '<|im_end|>' + '\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
"""Puts an empty block of thoughts before the last answer, as models do that think where they are asked to."""
TEMPLATES = {"chatml": CHATML, "llama": LLAMA, "strips": STRIPS, "no_system": NO_SYSTEM}


def tokenizer_folder(folder, template=CHATML, more=(), **config):
    """A byte-level BPE tokenizer, as most base models have one."""
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    special = ["<s>", "<|im_start|>", "<|im_end|>", *more]
    trainer = trainers.BpeTrainer(
        vocab_size=400,
        special_tokens=special,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(LINES * 3, trainer)
    tokenizer.save(str(folder / "tokenizer.json"))
    values = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": "<s>",
        "eos_token": "<|im_end|>",
        "chat_template": template,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(values | config))
    return folder


def semantic_ids(ids_I, sizes=(8, 8), fingerprint="of this data"):
    """A registry in which item number n, in order, has the codes (n // 8, n % 8)."""
    numbers_I = np.arange(len(ids_I))
    codes_IL = np.stack([numbers_I // sizes[1], numbers_I % sizes[1]], axis=1).astype(np.int16)
    return SemanticIdRegistry(np.asarray(ids_I), codes_IL, sizes, 2, "none", "by hand", fingerprint)
