"""The answers of each family of models, cut at every place, and the grammar that enforces their calls."""

from itertools import pairwise

import pytest

from gateway.text.tool_calls import FAMILIES, AnswerParser, grammar

TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "weather",
            "parameters": {"type": "object", "properties": {"city": {"type": "string"}, "days": {"type": "integer"}}},
        },
    },
    {"type": "function", "function": {"name": "now"}},
]
CALL = ("weather", '{"city": "Köln", "days": 2}')
NOW = ("now", "{}")
SHORT = ("weather", '{"a": 1}')


def parsed(family, reasoning, pieces, tools=TOOLS, is_cut=False, **options):
    """Return the reasoning, the content and the calls of an answer that comes in these pieces."""
    parser = AnswerParser(family, reasoning, tools, **options)
    thought, content, calls = "", "", []
    for number, piece in enumerate(pieces):
        is_last = number == len(pieces) - 1
        for delta in parser.feed(piece, is_last, is_last and is_cut):
            assert bool(delta.content) + bool(delta.reasoning) + bool(delta.call) == 1
            thought += delta.reasoning
            content += delta.content
            if call := delta.call:
                if call.name:
                    assert call.index == len(calls) and call.id.startswith("call_")
                    calls.append((call.name, ""))
                else:
                    assert call.index == len(calls) - 1 and not call.id
                calls[-1] = (calls[-1][0], calls[-1][1] + call.arguments)
    return thought, content, calls


def check(family, reasoning, text, expected, **options):
    assert parsed(family, reasoning, [text], **options) == expected
    assert parsed(family, reasoning, [*text, ""], **options) == expected
    for start, end in pairwise(range(len(text) + 1)):
        assert parsed(family, reasoning, [text[:start], text[start:end], text[end:]], **options) == expected


ARGUMENTS = CALL[1]
WEATHER = f'{{"name": "weather", "arguments": {ARGUMENTS}}}'
BOTH = f'[{WEATHER}, {{"name": "now", "arguments": {{}}}}]'
HERMES = f'<tool_call>\n{{"name": "weather", "arguments": {ARGUMENTS}}}\n</tool_call>'
HERMES_NOW = '<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>'
DEEPSEEK = f"<｜tool▁call▁begin｜>function<｜tool▁sep｜>weather\n```json\n{ARGUMENTS}\n```<｜tool▁call▁end｜>"
XML = "<parameter=city>\nKöln\n</parameter>\n<parameter=days>\n2\n</parameter>\n"


ANSWERS = [
    ("hermes", "Just text, 1 < 2 <tool", "Just text, 1 < 2 <tool", []),
    ("hermes", HERMES, "", [CALL]),
    ("hermes", f"I look.\n{HERMES}\n{HERMES_NOW}\nDone. ", "I look.Done. ", [CALL, NOW]),
    ("hermes", f'<tool_call>{{"arguments": {ARGUMENTS}, "name": "weather"}}</tool_call>', "", [CALL]),
    ("hermes", '<tool_call>{"name": "weather", "arguments": "{\\"a\\": 1}"}</tool_call>', "", [SHORT]),
    ("hermes", '<tool_call>{"name": "now"}</tool_call>', "", [NOW]),
    ("hermes", '<tool_call>{"arguments": {"a": "\\ud83d"}, "name": "n\\ud83d"}</tool_call>', "",
     [("n?", '{"a": "?"}')]),
    ("hermes", '<tool_call>{"name": "weather", "arguments": {"city": "a } \\" </tool_call>"}}</tool_call>', "",
     [("weather", '{"city": "a } \\" </tool_call>"}')]),
    ("hermes", '<tool_call>{"name": "weather", "arguments": {"a": 1}</tool_call> So.', "So.", [SHORT]),
    # Texts that are no calls, or end too early, are content.
    ("hermes", '<tool_call>{"city": "Rome"} </tool_call>.', '<tool_call>{"city": "Rome"} </tool_call>.', []),
    ("hermes", "<tool_call>weather<tool_call>[1]", "<tool_call>weather<tool_call>[1]", []),
    ("hermes", '<tool_call>{"name": "weat', '<tool_call>{"name": "weat', []),
    ("hermes", '<tool_call>{"name": "weather", "arguments": {"city": "K', "", [("weather", '{"city": "K')]),
    ("llama3", f'{{"name": "weather", "parameters": {ARGUMENTS}}}', "", [CALL]),
    ("llama3", f'<|python_tag|>{{"type": "function", "name": "weather", "parameters": {ARGUMENTS}}}; '
     '{"name": "now", "parameters": {}}<|eom_id|>', "", [CALL, NOW]),
    ("llama3", '{"name": "Ada", "parameters": {}}', '{"name": "Ada", "parameters": {}}', []),
    ("llama3", '{"city": "Rome"}', '{"city": "Rome"}', []),
    ("llama3", '{"name": "now", "city": "Rome"}', '{"name": "now", "city": "Rome"}', []),
    ("llama3", 'So {"name": "now", "parameters": {}}', 'So {"name": "now", "parameters": {}}', []),
    ("mistral", f"[TOOL_CALLS] {BOTH}", "", [CALL, NOW]),
    ("mistral", f"Yes[TOOL_CALLS]weather[ARGS]{ARGUMENTS}[TOOL_CALLS]now[CALL_ID]a1[ARGS]{{}}</s>",
     "Yes", [CALL, NOW]),
    ("mistral", "[TOOL_CALLS]no call", "[TOOL_CALLS]no call", []),
    ("phi", f"<|tool_call|>[{WEATHER}]<|/tool_call|>", "", [CALL]),
    ("phi", f"functools[{WEATHER}]", "", [CALL]),
    ("phi", f'<|tool_call|>[{{"type": "function", "function": {WEATHER}}}]', "", [CALL]),
    ("phi", '<|tool_call|>[{"type": "function", "function": {"name": "now", "arguments": {"a', "",
     [("now", '{"a')]),
    ("phi", "functools is a module", "functools is a module", []),
    ("granite", f"<|tool_call|>[{WEATHER}]", "", [CALL]),
    ("qwen3_coder", f"<tool_call>\n<function=weather>\n{XML}</function>\n</tool_call>\n"
     "<tool_call>\n<function=now>\n</function>\n</tool_call>", "", [CALL, NOW]),
    ("glm", "<tool_call>weather\n<arg_key>city</arg_key>\n<arg_value>Köln</arg_value>\n<arg_key>days</arg_key>\n"
     "<arg_value>2</arg_value>\n</tool_call><tool_call>now\n</tool_call>", "", [CALL, NOW]),
    ("deepseek", f"<｜tool▁calls▁begin｜>{DEEPSEEK}\n{DEEPSEEK}<｜tool▁calls▁end｜>", "", [CALL, CALL]),
    ("deepseek_v31", f"<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>weather<｜tool▁sep｜>{ARGUMENTS}"
     "<｜tool▁call▁end｜><｜tool▁calls▁end｜>", "", [CALL]),
    ("gemma4", 'Yes.<|tool_call>call:weather{city:<|"|>Köln<|"|>,days:2}<tool_call|>'
     "<|tool_call>call:now{}<tool_call|>", "Yes.", [CALL, NOW]),
    ("gemma4", '<|tool_call>call:weather{x:[{a:<|"|>b:c<|"|>},null]}<tool_call|>', "",
     [("weather", '{"x": [{"a": "b:c"}, null]}')]),
    ("gemma4", "<|tool_call>call:weather{<tool_call|>", "<|tool_call>call:weather{<tool_call|>", []),
    ("json", BOTH, "", [CALL, NOW]),
    ("json", " [1, 2]", " [1, 2]", []),
]  # fmt: skip


@pytest.mark.parametrize(("family", "text", "content", "calls"), ANSWERS)
def test_calls(family, text, content, calls):
    check(family, "", text, ("", content, calls))
    check(family, "", text, ("", text, []), tools=())


@pytest.mark.parametrize(("family", "text", "content", "calls"), [answer for answer in ANSWERS if answer[3]])
def test_answer_that_a_limit_ends_has_no_piece_of_markup(family, text, content, calls):
    for end in range(len(text)):
        for start in (0, end // 2, max(0, end - 1)):
            _, shown, begun = parsed(family, "", [text[:start], text[start:end]], is_cut=True)
            # A word that begins a call may begin any other text.
            assert content.startswith(shown.rstrip()) or "functools".startswith(shown)
            for (name, arguments), (whole_name, whole) in zip(begun, calls, strict=False):
                assert name == whole_name and whole.startswith(arguments)


@pytest.mark.parametrize(
    ("family", "text", "is_call"),
    [
        ("json", '[{"name": "wea', True),
        ("json", '{"na', True),
        ("json", '{"name": "weather", "argu', True),
        ("llama3", '{"type": "function", "na', True),
        ("json", '{"name": "Bob', False),
        ("json", '{"id": 7, "summary": "The ferry', False),
        ("llama3", '{"type": "report", "te', False),
        ("llama3", '{"city": "Ro', False),
    ],
)
def test_json_that_a_limit_ends_is_content_unless_it_begins_a_call(family, text, is_call):
    assert parsed(family, "", [text], is_cut=True) == ("", "" if is_call else text, [])


@pytest.mark.parametrize(
    ("reasoning", "text", "expected"),
    [
        ("think", "<thin", ("", "", [])),
        ("think", "<think>Hm. </th", ("Hm. ", "", [])),
        ("mistral", "[THINK]Hm.[/TH", ("Hm.", "", [])),
        ("think", "1 <", ("", "1 <", [])),
    ],
)
def test_reasoning_that_a_limit_ends_has_no_piece_of_markup(reasoning, text, expected):
    assert parsed("", reasoning, [text], tools=(), is_cut=True) == expected


@pytest.mark.parametrize(
    ("family", "reasoning", "text", "expected"),
    [
        ("", "", " as it is ", ("", " as it is ", [])),
        ("", "think", "<think>\nHm.\n</think>\n\nYes. ", ("\nHm.\n", "Yes. ", [])),
        ("", "think", "\n <thin", ("", "\n <thin", [])),
        ("", "think", "Yes <think>no</think>", ("", "Yes <think>no</think>", [])),
        ("", "think_opened", "Hm. </th</think>Yes.", ("Hm. </th", "Yes.", [])),
        ("", "think_opened", "<think>Hm.", ("Hm.", "", [])),
        ("", "gemma4", "<|channel>thought\nHm.<channel|>Yes.", ("Hm.", "Yes.", [])),
        ("", "mistral", "[THINK]Hm.[/THINK]Yes.", ("Hm.", "Yes.", [])),
        ("hermes", "think", f"<think>{HERMES_NOW}</think>\n{HERMES}", (HERMES_NOW, "", [CALL])),
        ("harmony", "harmony", "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant<|channel|>final"
         "<|message|>Yes.", ("Hm.", "Yes.", [])),
        ("harmony", "harmony", "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant<|channel|>commentary"
         f" to=functions.weather <|constrain|>json<|message|>{ARGUMENTS}", ("Hm.", "", [CALL])),
        ("harmony", "harmony", "<|channel|>commentary<|message|>I look.<|end|><|start|>assistant to=functions.weather"
         f"<|channel|>commentary json<|message|>{ARGUMENTS}<|call|>", ("", "I look.", [CALL])),
        ("harmony", "harmony", "<|channel|>analysis<|mess", ("", "", [])),
        ("harmony", "harmony", '{"a": 1}', ("", '{"a": 1}', [])),
    ],
)  # fmt: skip
def test_reasoning(family, reasoning, text, expected):
    check(family, reasoning, text, expected)


def test_arguments_arrive_as_they_are_generated():
    parser = AnswerParser("hermes", "", TOOLS)
    deltas = [parser.feed(piece, False) for piece in ('<tool_call>{"name": "weather", "arguments": {"ci', 'ty": "Rom')]
    assert [delta.call.arguments for (delta,) in deltas] == ['{"ci', 'ty": "Rom']


def test_one_call_at_most_without_parallel_calls():
    check("hermes", "", f"{HERMES}\n{HERMES_NOW}", ("", "", [CALL]), parallel=False)


def test_long_answers_take_linear_time_and_deep_ones_no_recursion():
    text = "[" * 100_000
    assert parsed("json", "", [text]) == ("", text, [])
    text = '<tool_call>{"name": "weather", "arguments": ' + '{"a":' * 10_000
    assert parsed("hermes", "", [text])[2][0][1] == '{"a":' * 10_000
    text = "<tool_call>" + '{"function": ' * 10_000
    assert parsed("hermes", "", [text]) == ("", text, [])
    text = "<tool_call><function=weather>" + "<parameter=>" * 10_000 + "</function>"
    assert parsed("qwen3_coder", "", [text])[2] == [("weather", "{}")]
    text = "<tool_call>weather" + "<arg_key></arg_key>" * 10_000 + "</tool_call>"
    assert parsed("glm", "", [text])[2] == [("weather", "{}")]
    text = "<|tool_call>call:weather{" + "a" * 100_000 + "<tool_call|>"
    assert parsed("gemma4", "", [text]) == ("", text, [])


@pytest.mark.parametrize("properties", [None, [1], {"city": None}, {"city": {"type": 5}}])
def test_arguments_are_read_without_a_valid_schema(properties):
    tool = {"type": "function", "function": {"name": "weather", "parameters": {"properties": properties}}}
    text = "<tool_call><function=weather><parameter=city>Rome</parameter></function></tool_call>"
    check("qwen3_coder", "", text, ("", "", [("weather", '{"city": "Rome"}')]), tools=[tool])


@pytest.mark.parametrize("family", FAMILIES)
def test_parser_reads_what_the_grammar_enforces(family):
    form = FAMILIES[family]
    one = form.before % "weather" + ARGUMENTS + form.after
    more = form.between + form.before % "now" + "{}" + form.after if form.last else ""
    text = form.first + one + more + form.last
    check(family, "harmony" if family == "harmony" else "", text, ("", "", [CALL, NOW] if more else [CALL]))


NAMED = {"type": "function", "function": {"name": "now"}}
SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}}


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        (("", TOOLS, "auto", True), None),
        (("", TOOLS, "none", True, "think"), None),
        (("", [], "auto", True, "", {"json": SCHEMA}), {"json": SCHEMA}),
    ],
)
def test_grammar_leaves_free_what_no_field_restricts(options, expected):
    assert grammar(*options) == expected


def test_grammar_of_required_and_named_tools():
    def calls(choice, parallel):
        return grammar("llama3", TOOLS, choice, parallel)["structural_tag"]["format"]

    now = {
        "type": "tag",
        "begin": '{"name": "now", "parameters": ',
        "content": {"type": "json_schema", "json_schema": {"type": "object", "additionalProperties": False}},
        "end": "",
    }
    end = {"type": "const_string", "value": "}"}
    assert calls(NAMED, True) == {"type": "sequence", "elements": [now, end]}
    required = calls("required", True)
    assert required["end"] == "}" and required["content"]["at_least_one"]
    assert len(required["content"]["tags"]) == 2 and now in required["content"]["tags"]
    either, after = calls("required", False)["elements"]
    assert either == {"type": "or", "elements": required["content"]["tags"]} and after == end


def test_grammar_allows_reasoning_and_the_schema_of_an_answer_without_calls():
    form = grammar("hermes", TOOLS, "auto", True, "think", {"json": SCHEMA})["structural_tag"]["format"]
    thoughtful, direct = form["elements"]
    assert thoughtful["elements"][0]["begin"] == "<think>" and thoughtful["elements"][1] == direct
    assert direct["elements"][1] == {"type": "json_schema", "json_schema": SCHEMA}
    final = grammar("harmony", [], "auto", True, "harmony", {"json": SCHEMA})["structural_tag"]["format"]
    assert final["elements"] == [
        {"type": "const_string", "value": "<|channel|>final<|message|>"},
        direct["elements"][1],
    ]
    (thought, _) = grammar("", [], "auto", True, "think_opened", {"regex": "a"})["structural_tag"]["format"]["elements"]
    assert (thought["begin"], thought["end"]) == ("", "</think>\n\n")
