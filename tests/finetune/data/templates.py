"""Templates in the manner of five families, with and without ``{% generation %}``, and chats to render with them."""

CHATML = """{%- if messages[0]['role'] != 'system' %}{{ '<|im_start|>system\\nBe brief.<|im_end|>\\n' }}{% endif %}
{%- for message in messages %}
{{- '<|im_start|>' + message.role + '\\n' }}
{%- if message.role == 'assistant' %}(*{{- message.content + '<|im_end|>' }}*){%- else %}
{{- message.content + '<|im_end|>' }}{%- endif %}
{{- '\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}"""
LLAMA = """{{- bos_token }}
{%- for message in messages %}
    {{- '<|start_header_id|>' + message['role'] + '<|end_header_id|>\\n\\n' }}
    {%- if message.role == 'assistant' %}(*{{- message['content'] | trim + '<|eot_id|>' }}*)
    {%- else %}{{- message['content'] | trim + '<|eot_id|>' }}{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}{%- endif %}"""
GEMMA = """{{ bos_token }}{% if messages[0]['role'] == 'system' %}{{ raise_exception('No system role') }}{% endif %}
{% for message in messages %}
{% if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}{{ raise_exception('Roles must alternate') }}{% endif %}
{% set role = 'model' if message['role'] == 'assistant' else message['role'] %}
{{ '<start_of_turn>' + role + '\\n' }}{% if role == 'model' %}
(*{{ message['content'] | trim + '<end_of_turn>\\n' }}*){% else %}
{{ message['content'] | trim + '<end_of_turn>\\n' }}{% endif %}
{% endfor %}{% if add_generation_prompt %}{{ '<start_of_turn>model\\n' }}{% endif %}"""
MISTRAL = """{{ bos_token }}{% for message in messages %}{% if message['role'] == 'user' %}
{{- ' [INST] ' + message['content'] + ' [/INST]' }}{% elif message['role'] == 'assistant' %}
{%- if false %}{% continue %}{% endif %}(*{{- ' ' + message['content'] + eos_token }}*){% else %}
{{- raise_exception('Only user and assistant roles are supported!') }}{% endif %}{% endfor %}"""
PHI = """{% for message in messages %}{% if message['role'] == 'system' %}
{{- '<|system|>\\n' + message['content'] + '<|end|>\\n' }}
{%- elif message['role'] == 'user' %}{{ '<|user|>\\n' + message['content'] + '<|end|>\\n' }}
{%- elif message['role'] == 'assistant' %}{{ '<|assistant|>\\n' }}(*{{ message['content'] + '<|end|>\\n' }}*)
{%- endif %}{% endfor %}{% if add_generation_prompt %}{{ '<|assistant|>\\n' }}{% endif %}"""
FAMILIES = {"chatml": CHATML, "llama": LLAMA, "gemma": GEMMA, "mistral": MISTRAL, "phi": PHI}
SPECIAL = {"bos_token": "<s>", "eos_token": "</s>"}


def marked(source: str) -> str:
    return source.replace("(*", "{% generation %}").replace("*)", "{% endgeneration %}")


def plain(source: str) -> str:
    return source.replace("(*", "").replace("*)", "")


def chat(*contents: str) -> list[dict[str, str]]:
    """Turns of user and assistant, one after the other."""
    return [{"role": ("user", "assistant")[i % 2], "content": text} for i, text in enumerate(contents)]


CHATS = [
    chat("When is the ebb?", "At noon."),
    chat("naïve 潮 <b>\n", "Yes: {'a': 1} & more", "and then?", "  spaces  before\n\nand after "),
    chat("a", "b", "c", "d", "e", "f"),
]
