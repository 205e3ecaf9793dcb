"""Texts continued together, on tiny models of the real architectures: each row as if it were alone."""

from __future__ import annotations

import json

import pytest
import sentencepiece
import torch
from google.protobuf import text_format
from transformers import AutoModelForCausalLM, AutoTokenizer
from tritonclient.grpc.model_config_pb2 import ModelConfig

from scripts.common.settings import ROOT, UserError
from scripts.models.catalogue import Job
from scripts.models.exporters.generation import assemble
from shared import pretrained
from shared.decoding import Decoder, Options, Row, draw, partial_stop_length
from shared.errors import ConfigError
from shared.pretrained import check_it_fits, chosen_dtype, size, stored_weights
from tests.support.checkpoints import language

PROMPTS = ["I am going", "Which battery", "비 그친 뒤", "Grüße 🥖 aus München: schönes Wetter,", "It"]
ARCHITECTURES = {
    "falcon": language.save_falcon,
    "mistral": language.save_mistral,
    "persimmon": language.save_persimmon,
    "gpt2": language.save_gpt2,
}


def options(**said) -> Options:
    return Options(**{"max_new_tokens": 24, "temperature": 0.0, "top_p": 1.0, "seed": 1, "stop": ()} | said)


@pytest.fixture(scope="module", autouse=True)
def one_thread():
    """Models this small only wait for a second one."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module", params=ARCHITECTURES)
def decoder(request, tmp_path_factory) -> Decoder:
    return load(ARCHITECTURES[request.param](tmp_path_factory.mktemp(request.param)))


@pytest.fixture(scope="module")
def gpt2(tmp_path_factory) -> Decoder:
    return load(language.save_gpt2(tmp_path_factory.mktemp("gpt2")))


def load(folder) -> Decoder:
    return Decoder(AutoModelForCausalLM.from_pretrained(folder), AutoTokenizer.from_pretrained(folder))


def rows(decoder: Decoder, prompts: list[str], *each: Options) -> list[Row]:
    each = each or (options(),) * len(prompts)
    return [Row(prompt, decoder.encode(prompt), said) for prompt, said in zip(prompts, each, strict=True)]


def generated(decoder: Decoder, asked: list[Row], tell=lambda: None) -> list[str]:
    decoder.generate(asked, tell)
    return [row.text for row in asked]


def alone(decoder: Decoder, prompt: str, new_tokens: int = 24) -> str:
    """What transformers itself says, without the prompt."""
    tokens = decoder.tokenizer(prompt, return_tensors="pt", return_token_type_ids=False)
    answer = decoder.model.generate(**tokens, max_new_tokens=new_tokens, do_sample=False, pad_token_id=0)
    text = decoder.tokenizer.decode(answer[0], skip_special_tokens=True, clean_up_tokenization_spaces=False)
    assert text.startswith(prompt)
    return text.removeprefix(prompt)


def test_together_as_alone(decoder):
    lengths = [24, 3, 17, 9, 1]
    asked = rows(decoder, PROMPTS, *(options(max_new_tokens=n) for n in lengths))
    expected = [alone(decoder, prompt, n) for prompt, n in zip(PROMPTS, lengths, strict=True)]
    assert len(set(expected)) == len(expected)
    assert generated(decoder, asked) == expected


def test_a_long_prompt_and_a_long_answer_go_apart(decoder, monkeypatch):
    """Side by side they would pass the model's context, which each alone fits."""
    monkeypatch.setattr(decoder, "token_cost", 0.0)  # padding is for nothing
    prompts = ["a 1 " * 65, "It", "I am"]
    asked = rows(decoder, prompts, *(options(max_new_tokens=n) for n in (5, 120, 3)))
    assert len(asked[0].prompt_tokens) > decoder.context - 120
    parts = decoder.batches(asked)
    assert sorted(map(len, parts)) == [1, 2]
    for part in parts:
        decoder.generate(part, lambda: None)
    assert [row.text for row in asked] == [alone(decoder, *each) for each in zip(prompts, (5, 120, 3), strict=True)]
    assert decoder.batches(asked[1:]) == [asked[1:]]
    assert decoder.batches([]) == []


def test_padding_is_weighed_against_steps(gpt2, monkeypatch):
    prompts = ["It", "a 1 " * 40, "I am", "a 1 " * 41]
    asked = rows(gpt2, prompts, *(options(max_new_tokens=n) for n in (8, 8, 8, 8)))
    monkeypatch.setattr(gpt2, "step_cost", 1.0)
    monkeypatch.setattr(gpt2, "token_cost", 1.0)
    assert [[row.prompt for row in part] for part in gpt2.batches(asked)] == [["It", "I am"], [prompts[1], prompts[3]]]
    monkeypatch.setattr(gpt2, "token_cost", 0.001)
    assert [len(part) for part in gpt2.batches(asked)] == [4]


def test_pieces_are_beginnings_of_the_text(decoder):
    """Random weights say many incomplete characters: none is shown before it is whole, or known to be broken."""
    asked = rows(decoder, PROMPTS)
    seen: list[list[str]] = [[] for _ in asked]

    def tell() -> None:
        for row, texts in zip(asked, seen, strict=True):
            texts.append(row.text)

    for row, final, texts in zip(asked, generated(decoder, asked, tell), seen, strict=True):
        assert final == alone(decoder, row.prompt)
        assert all(final.startswith(text) for text in texts)
        assert len(set(texts)) > 2


def test_sampling_does_not_hang_on_the_company(decoder):
    said = [options(temperature=1.5, seed=n, top_p=0.9 if n % 2 else 1.0) for n in range(len(PROMPTS))]
    together = generated(decoder, rows(decoder, PROMPTS, *said))
    apart = [generated(decoder, rows(decoder, [p], o))[0] for p, o in zip(PROMPTS, said, strict=True)]
    assert together == apart
    assert together != [alone(decoder, prompt) for prompt in PROMPTS]
    assert generated(decoder, rows(decoder, PROMPTS[:1], options(temperature=1.5, seed=99))) != together[:1]


def test_greedy_and_sampling_rows_in_one_batch(gpt2):
    asked = rows(gpt2, ["I am going", "I am going"], options(), options(temperature=2.0))
    greedy, sampled = generated(gpt2, asked)
    assert greedy == alone(gpt2, "I am going") != sampled


def test_a_row_ends_at_the_end_token(gpt2):
    whole = rows(gpt2, ["I am going"])
    generated(gpt2, whole)
    end = whole[0].tokens[len(whole[0].prompt_tokens) + 5]
    ending = Decoder(gpt2.model, gpt2.tokenizer)
    ending.end_tokens = {end}
    asked = rows(ending, ["I am going", "Which battery"])
    generated(ending, asked)
    assert asked[0].tokens == whole[0].tokens[: len(asked[0].tokens)]
    assert asked[0].tokens[-1] == end
    assert asked[0].new_tokens <= 6


def test_a_row_that_is_done_stays_as_it_is(gpt2):
    asked = rows(gpt2, PROMPTS[:2])

    def tell() -> None:
        asked[0].done = asked[0].new_tokens >= 4

    generated(gpt2, asked, tell)
    assert [row.new_tokens for row in asked] == [4, 24]


@pytest.mark.parametrize("at", [1, 6, 14])
def test_stop_strings(gpt2, at):
    whole = alone(gpt2, "Which battery", 40)
    stop = whole[at : at + 4]
    first = whole.find(stop)
    asked = rows(gpt2, ["Which battery"], options(max_new_tokens=40, stop=("never said", stop)))
    seen = []
    (text,) = generated(gpt2, asked, lambda: seen.append(asked[0].text))
    assert text == whole[:first]
    assert all(text.startswith(shown) for shown in seen), "text that a stop string takes back was shown"
    assert asked[0].new_tokens < 40


@pytest.mark.parametrize(
    ("stops", "text", "held"),
    [(["abc"], "xxab", 2), (["abc"], "xabx", 0), (["abc", "bcd"], "abc"[1:], 2), (["aab"], "aaa", 2), ([], "a", 0)],
)
def test_what_may_begin_a_stop_string(stops, text, held):
    assert partial_stop_length(stops, text) == held


@pytest.mark.parametrize(
    ("said", "drawn"),
    [
        ({"temperature": 1.0, "top_p": 0.7}, {0: 0.73, 3: 0.27}),  # 0.64 and 0.24: the one that passes 0.7 still counts
        ({"temperature": 1.0}, {0: 0.64, 1: 0.03, 2: 0.09, 3: 0.24}),
        ({"temperature": 1e-38}, {0: 1.0}),
    ],
)
def test_what_is_drawn_how_often(said, drawn):
    scores = torch.tensor([3.0, 0.0, 1.0, 2.0])
    beside = Row("", [0], options(temperature=9.0, top_p=0.5))
    row = Row("", [0], options(**said))
    tokens = [int(draw(torch.stack([scores, scores]), [beside, row])[1]) for _ in range(2000)]
    assert {token: tokens.count(token) / 2000 for token in set(tokens)} == pytest.approx(drawn, abs=0.03)


def test_an_empty_prompt(decoder):
    (text,) = generated(decoder, rows(decoder, [""]))
    assert text


def test_the_size_is_known_before_loading(tmp_path):
    folder = language.save_gpt2(tmp_path)
    stored = stored_weights(folder)
    numbers = sum(weight.numel() for weight in load(folder).model.parameters())
    assert stored == {"F32": numbers}
    assert chosen_dtype("auto", stored) is torch.float32
    assert size(stored, torch.bfloat16) == 2 * numbers
    with pytest.raises(ConfigError, match=r"big takes about 14\.4 GB and 5\.1 GB of memory are free here"):
        check_it_fits("big", 14.4e9, int(5.1e9))


@pytest.mark.parametrize(
    ("parameters", "dtype"),
    [({}, torch.bfloat16), ({"dtype": "float32"}, torch.float32), ({"dtype": "float16"}, torch.float16)],
)
def test_half_precision_on_a_cpu(tmp_path, parameters, dtype):
    stored = language.save_gpt2(tmp_path / "mine/1")
    AutoModelForCausalLM.from_pretrained(stored, dtype=torch.float16).save_pretrained(stored)
    args = {
        "model_name": "other",
        "model_repository": str(tmp_path / "other"),
        "model_version": "1",
        "model_instance_kind": "CPU",
        "model_instance_device_id": "0",
    }
    parameters = {name: {"string_value": value} for name, value in (parameters | {"weights": "mine"}).items()}
    assert pretrained.load(AutoModelForCausalLM, {"parameters": parameters}, args).dtype is dtype


# --- the recipe -------------------------------------------------------------------------------------------------------


def job(weights, folder, system: str = "mymodel", **more) -> Job:
    return Job(system, "text-generation", "python", weights, False, folder, **more)


def parsed(path) -> ModelConfig:
    return text_format.Parse(path.read_text(), ModelConfig())


@pytest.mark.parametrize("system", ["falcon7b", "mistral7b", "persimmon8b"])
def test_configs_by_hand_are_those_that_would_be_made(tmp_path, system):
    assemble(job(language.save_gpt2(tmp_path / "weights"), tmp_path / "made"))
    for suffix in ("", "_stream"):
        made = parsed(tmp_path / f"made/mymodel{suffix}/config.pbtxt")
        made.name = f"{system}{suffix}"
        if suffix:
            made.parameters["weights"].string_value = system
        assert parsed(ROOT / f"model_repository/{system}{suffix}/config.pbtxt") == made


def test_only_what_is_needed_is_taken(tmp_path):
    weights = language.save_mistral(tmp_path / "weights")
    for name in ("consolidated.safetensors", "pytorch_model.bin", "modeling_custom.py", "README.md"):
        (weights / name).touch()
    assemble(job(weights, tmp_path / "made"))
    taken = {file.name for file in (tmp_path / "made/mymodel/1").iterdir()}
    assert {"config.json", "model.safetensors", "tokenizer.json"} <= taken
    assert not taken & {"consolidated.safetensors", "pytorch_model.bin", "modeling_custom.py", "README.md"}
    assert list((tmp_path / "made/mymodel_stream/1").iterdir()) == []

    assemble(job(weights, tmp_path / "trusted", trust_remote_code=True))
    assert (tmp_path / "trusted/mymodel/1/modeling_custom.py").exists()
    assert parsed(tmp_path / "trusted/mymodel/config.pbtxt").parameters["trust_remote_code"].string_value == "1"


def test_weights_in_several_files(tmp_path):
    weights = language.save_falcon(tmp_path / "weights")
    AutoModelForCausalLM.from_pretrained(weights).save_pretrained(weights, max_shard_size="50KB")
    (weights / "model.safetensors").unlink()
    assemble(job(weights, tmp_path / "made"))
    made = tmp_path / "made/mymodel/1"
    assert len(list(made.glob("model-*.safetensors"))) > 1
    assert sum(stored_weights(made).values()) == sum(w.numel() for w in load(made).model.parameters())


@pytest.mark.parametrize(
    ("spoil", "reason"),
    [
        (lambda folder: (folder / "config.json").unlink(), "no config.json"),
        (lambda folder: (folder / "model.safetensors").rename(folder / "pytorch_model.bin"), "save_pretrained"),
        (lambda folder: (folder / "model.safetensors").unlink(), "no model.safetensors"),
        (lambda folder: (folder / "tokenizer.json").write_text("{"), "does not load in transformers"),
        (lambda folder: (folder / "config.json").write_text('{"model_type": "vit"}'), "set another TASK"),
    ],
)
def test_what_cannot_be_served_is_refused(tmp_path, spoil, reason):
    weights = language.save_mistral(tmp_path / "weights")
    spoil(weights)
    with pytest.raises(UserError, match=reason):
        assemble(job(weights, tmp_path / "made"))
    assert not (tmp_path / "made").exists()


def test_a_tokenizer_of_sentencepiece_is_served_without_it(tmp_path):
    """As persimmon8b's, which is a tokenizer.model only."""
    source = language.save_persimmon(tmp_path / "source")
    for file in source.glob("*token*"):
        file.unlink()
    (tmp_path / "lines.txt").write_text(language.LINES)
    sentencepiece.SentencePieceTrainer.train(
        input=str(tmp_path / "lines.txt"), model_prefix=str(source / "tokenizer"), vocab_size=90
    )
    (source / "tokenizer_config.json").write_text('{"tokenizer_class": "LlamaTokenizer"}')
    assemble(Job("story", "text-generation", "python", source, False, tmp_path / "made"))
    (tmp_path / "made/story/1/tokenizer.model").unlink(missing_ok=True)
    served = AutoTokenizer.from_pretrained(tmp_path / "made/story/1")
    original = AutoTokenizer.from_pretrained(source)
    assert served("It was raining, schönes Wetter").input_ids == original("It was raining, schönes Wetter").input_ids
    assert len(served("It was raining").input_ids) > 3


def test_an_index_names_files_beside_it_and_no_others(tmp_path):
    source, secret = language.save_falcon(tmp_path / "source"), tmp_path / "secret.safetensors"
    (source / "model.safetensors").rename(secret)
    for name in (str(secret), "../secret.safetensors", "config.json"):
        (source / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"x": name}}))
        with pytest.raises(UserError, match=r"which is not a \*\.safetensors file in the same folder"):
            assemble(Job("story", "text-generation", "python", source, True, tmp_path / "made"))
    assert secret.exists()
    (source / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"x": str(secret)}}))
    with pytest.raises(FileNotFoundError):  # nor are they read where they are served
        stored_weights(source)


def test_what_the_checkpoint_says_of_penalties_does_not_hang_on_the_company(tmp_path):
    """generate() would count a row's padding, too."""
    folder = language.save_gpt2(tmp_path)
    path = folder / "generation_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"repetition_penalty": 3.0, "max_time": 0.001}))
    decoder = Decoder(AutoModelForCausalLM.from_pretrained(folder), AutoTokenizer.from_pretrained(folder))
    assert decoder.model.generation_config.repetition_penalty in (None, 1.0)
    assert decoder.model.generation_config.max_time is None


def test_a_model_without_a_head_for_it_is_refused(tmp_path):
    source = language.save_mistral(tmp_path / "source")
    config = json.loads((source / "config.json").read_text())
    (source / "config.json").write_text(json.dumps(config | {"architectures": ["MistralForSequenceClassification"]}))
    with pytest.raises(UserError, match="which has no language-model head"):
        assemble(Job("story", "text-generation", "python", source, False, tmp_path / "made"))
