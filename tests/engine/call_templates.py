"""Small chat templates that write tool calls in the forms of the known families."""

from __future__ import annotations

START, END = "<|im_start|>", "<|im_end|>\n"
TOOLS = "{% if tools %}<|im_start|>system\n{% for tool in tools %}{{ tool | tojson }}\n{% endfor %}<|im_end|>\n{% endif %}"


def family(call: str, *, opens: str = "", closes: str = "", between: str = "", result: str = "{{ m.content }}", rule: str = "") -> str:
    """A ChatML template that writes each call as `call`, a text of Jinja in which `c` is the function, `t` the call and `m` the message."""
    return (
        TOOLS
        + "{% for m in messages %}"
        + rule
        + "{% if m.role == 'tool' %}<|im_start|>tool\n"
        + result
        + "<|im_end|>\n{% else %}<|im_start|>{{ m.role }}\n{{ m.content }}"
        + "{% if m.tool_calls %}"
        + opens
        + "{% for t in m.tool_calls %}{% set c = t.function %}"
        + ("{% if not loop.first %}" + between + "{% endif %}" if between else "")
        + call
        + "{% endfor %}"
        + closes
        + "{% endif %}<|im_end|>\n{% endif %}{% endfor %}"
        + "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    )


NINE = "{% if m.tool_call_id is defined and m.tool_call_id | length != 9 %}{{ raise_exception('nine letters!') }}{% endif %}"
FAMILIES = {
    "hermes": family(
        '<tool_call>\n{"name": "{{ c.name }}", "arguments": {{ c.arguments | tojson }}}\n</tool_call>',
        between="{{ '\\n' }}",
        result="<tool_response>\n{{ m.content }}\n</tool_response>",
    ),
    "array": family(
        '{"name": "{{ c.name }}", "arguments": {{ c.arguments | tojson }}, "id": "{{ t.id }}"}',
        opens="[TOOL_CALLS][",
        closes="]",
        between=", ",
        result='{"content": {{ m.content | tojson }}, "call_id": "{{ m.tool_call_id }}"}',
        rule=NINE,
    ),
    "named": family("[TOOL_CALLS]{{ c.name }}[ARGS]{{ c.arguments | tojson }}"),
    "llama": family('{"name": "{{ c.name }}", "parameters": {{ c.arguments | tojson }}}', result="{{ m.content | tojson }}"),
    "ascii": family('<tool_call>{"name": "{{ c.name }}", "arguments": {{ c.arguments | tojson(ensure_ascii=true) }}}</tool_call>'),
    "text": family("<function={{ c.name }}>{{ '' + c.arguments }}</function>"),
    "xml": family(
        "<tool_call>\n<function={{ c.name }}>\n{% for k, v in c.arguments | items %}<parameter={{ k }}>\n"
        "{{ v if v is string else v | tojson }}\n</parameter>\n{% endfor %}</function>\n</tool_call>",
        between="{{ '\\n' }}",
    ),
    "pairs": family(
        "<tool_call>{{ c.name }}\n{% for k, v in c.arguments.items() %}<arg_key>{{ k }}</arg_key>\n"
        "<arg_value>{{ v if v is string else v | tojson }}</arg_value>\n{% endfor %}</tool_call>"
    ),
    "typed": family(
        '<invoke name="{{ c.name }}">{% for k, v in c.arguments.items() %}'
        '<p name="{{ k }}" string="{{ "true" if v is string else "false" }}">'
        "{{ v if v is string else v | tojson }}</p>{% endfor %}</invoke>",
        opens="<calls>",
        closes="</calls>",
    ),
    "python": family(
        "{{ c.name }}({% for k, v in c.arguments.items() %}{{ ', ' if not loop.first }}{{ k }}="
        '{{ "\'" ~ v ~ "\'" if v is string else v | tojson }}{% endfor %})',
        opens="<|tool_call_start|>[",
        closes="]<|tool_call_end|>",
        between=", ",
    ),
    "sorted": family(
        "<|tool_call>call:{{ c.name }}{{ '{' }}{% for k, v in c.arguments | dictsort %}{{ ',' if not loop.first }}{{ k }}:"
        "{{ '<|\"|>' ~ v ~ '<|\"|>' if v is string else v | tojson }}{% endfor %}{{ '}' }}<tool_call|>"
    ),
    "counted": "{% set n = namespace(ids=[]) %}"
    + family(
        "{% set i = 'functions.' ~ c.name ~ ':' ~ n.ids | length %}{% set _ = n.ids.append(i) %}"
        "<|call_begin|>{{ i }}<|args|>{{ c.arguments | tojson }}<|call_end|>",
        opens="<|calls_begin|>",
        closes="<|calls_end|>",
        result="## Return of {{ n.ids.pop(0) }}\n{{ m.content }}",
    ),
}
"""Of Hermes and Qwen, Mistral (two), Llama, Reka, functionary, Qwen3-Coder, GLM, DeepSeek, LFM2, gemma and Kimi."""
NO_NAME = family("").replace("{% for t in m.tool_calls %}{% set c = t.function %}{% endfor %}", "")
FIRST_ONLY = family("{% if loop.first %}<call>{{ c.name }}{{ c.arguments | tojson }}</call>{% endif %}")
WITHOUT_TEXT = (
    family("<call>{{ c.name }}{{ c.arguments | tojson }}</call>")
    .replace("{{ m.content }}{% if m.tool_calls %}", "{% if m.tool_calls %}")
    .replace("{% endfor %}{% endif %}<|im_end|>\n{% endif %}", "{% endfor %}{% else %}{{ m.content }}{% endif %}<|im_end|>\n{% endif %}")
)
CHANNELS = (
    "{# analysis #}{% for t in tools %}functions.{{ t.function.name }}: {{ t.function.description }}\n{% endfor %}"
    "{% for m in messages %}{% if m.role == 'tool' %}"
    "<|start|>functions to=assistant<|channel|>commentary<|message|>{{ m.content | tojson }}<|end|>"
    "{% elif m.tool_calls %}{% for t in m.tool_calls %}"
    "<|start|>assistant to=functions.{{ t.function.name }}<|channel|>commentary json<|message|>"
    "{{ t.function.arguments | tojson }}<|call|>{% endfor %}"
    "{% elif m.role == 'assistant' %}<|start|>assistant<|channel|>final<|message|>{{ m.content }}<|end|>"
    "{% else %}<|start|>{{ m.role }}<|message|>{{ m.content }}<|end|>{% endif %}{% endfor %}<|start|>assistant"
)
"""Of gpt-oss."""
