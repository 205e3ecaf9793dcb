"""Chat templates with tools, which have the constructs of well-known checkpoints."""

TOOLS_HERMES = """\
{%- if tools %}
    {{- '<|im_start|>system\\n' }}
    {%- if messages[0].role == 'system' %}{{ messages[0].content + '\\n\\n' }}{% endif %}
    {%- for tool in tools %}
        {{- "\\n" }}
        {{- tool | tojson }}
    {%- endfor %}
    {{- "\\nAnswer with <tool_call>...</tool_call>.<|im_end|>\\n" }}
{%- endif %}
{%- for message in messages %}
    {%- if message.role == "tool" %}
        {{- '<|im_start|>user\\n<tool_response>\\n' + message.content + '\\n</tool_response><|im_end|>\\n' }}
    {%- else %}
        {{- '<|im_start|>' + message.role }}
        {%- if message.content %}{{ '\\n' + message.content }}{% endif %}
        {%- for call in message.tool_calls %}
            {%- if call.function %}{% set call = call.function %}{% endif %}
            {{- '\\n<tool_call>\\n{"name": "' + call.name + '", "arguments": ' }}
            {{- call.arguments | tojson }}
            {{- '}\\n</tool_call>' }}
        {%- endfor %}
        {{- '<|im_end|>\\n' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
    {%- if enable_thinking is defined and enable_thinking is false %}{{ '<think>\\n\\n</think>\\n\\n' }}{% endif %}
{%- endif %}
"""
TOOLS_LLAMA = """\
{{- bos_token }}
{%- if not tools is defined %}{% set tools = none %}{% endif %}
{%- if tools is not none %}
    {{- 'Respond in the format {"name": function name, "parameters": dictionary of argument name and its value}.' }}
    {%- for t in tools %}{{ t | tojson(indent=4) + "\\n\\n" }}{% endfor %}
{%- endif %}
{%- for message in messages %}
    {%- if 'tool_calls' in message %}
        {%- if not message.tool_calls | length == 1 %}{{ raise_exception("single tool-calls only") }}{% endif %}
        {%- set call = message.tool_calls[0].function %}
        {{- '{"name": "' + call.name + '", "parameters": ' }}{{ call.arguments | tojson }}}
    {%- elif message.role == "tool" %}
        {{- "ipython " }}
        {%- if message.content is mapping %}{{ message.content | tojson }}{% else %}{{ message.content }}{% endif %}
    {%- else %}{{ message.role + ": " + message.content }}{% endif %}
{%- endfor %}
"""
TOOLS_MISTRAL = """\
{%- set users = messages | selectattr("role", "equalto", "user") | list %}
{%- for message in messages %}
    {%- if message["role"] == "user" %}
        {%- if tools is not none and message == users[-1] %}
            {{- "[AVAILABLE_TOOLS] [" }}
            {%- for tool in tools %}
                {{- '{"type": "function", "function": {' }}
                {%- for key, val in tool.function.items() if key != "return" %}
                    {{- '"' + key + '": ' }}{{ val | tojson }}{% if not loop.last %}{{ ", " }}{% endif %}
                {%- endfor %}
                {{- "}}" }}{% if not loop.last %}{{ ", " }}{% endif %}
            {%- endfor %}
            {{- "][/AVAILABLE_TOOLS]" }}
        {%- endif %}
        {{- "[INST] " + message["content"] + "[/INST]" }}
    {%- elif message.tool_calls is defined %}
        {{- "[TOOL_CALLS] [" }}
        {%- for call in message.tool_calls %}
            {%- if call.id | length != 9 %}{{ raise_exception("Tool call IDs should have length 9!") }}{% endif %}
            {{- (call.function | tojson)[:-1] + ', "id": "' + call.id + '"}' }}
        {%- endfor %}
        {{- "]" + eos_token }}
    {%- elif message["role"] == "tool" %}
        {{- '[TOOL_RESULTS] {"content": ' + message.content | string + ', "call_id": "' + message.tool_call_id + '"}' }}
    {%- endif %}
{%- endfor %}
"""
TOOL_TEMPLATES = {"hermes": TOOLS_HERMES, "llama": TOOLS_LLAMA, "mistral": TOOLS_MISTRAL}
