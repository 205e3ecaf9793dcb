"""Continuing texts together gives each row the text that it gets alone, on tiny models of the real architectures."""

from __future__ import annotations

import functools
import json

import pytest
import sentencepiece
import torch
from google.protobuf import text_format
from transformers import AutoModelForCausalLM, AutoTokenizer
from tritonclient.grpc.model_config_pb2 import ModelConfig

from export.assemble import run_recipe
from export.catalogue import RECIPES, Job
from export.recipes.language import openvino
from export.recipes.language.recipe import assemble
from serving.engines import pretrained
from serving.engines.pretrained import chosen_dtype, size, stored_weights
from serving.generation.decoding import Decoder, draw
from serving.generation.row import Options, Row, partial_stop_length
from serving.triton.memory import check_it_fits
from serving.triton.types import ConfigError
from tests.support.checkpoints import language
from triton_transformers.settings import ROOT, UserError

pytestmark = pytest.mark.usefixtures("one_thread")

PROMPTS = ["I am going", "Which battery", "비 그친 뒤", "Grüße 🥖 aus München: schönes Wetter,", "It"]


def options(**changes) -> Options:
    return Options(**{"max_new_tokens": 24, "temperature": 0.0, "top_p": 1.0, "seed": 1, "stop": ()} | changes)


@pytest.fixture(scope="module")
def gpt2(tmp_path_factory) -> Decoder:
    return load(language.save_gpt2(tmp_path_factory.mktemp("gpt2")))


def load(folder) -> Decoder:
    return Decoder(AutoModelForCausalLM.from_pretrained(folder), AutoTokenizer.from_pretrained(folder))


def rows(decoder: Decoder, prompts: list[str], *row_options: Options) -> list[Row]:
    row_options = row_options or (options(),) * len(prompts)
    pairs = zip(prompts, row_options, strict=True)
    return [Row(prompt, decoder.encode(prompt), own_options) for prompt, own_options in pairs]


def generate(decoder: Decoder, batch: list[Row], after_token=lambda: None) -> list[str]:
    decoder.generate(batch, after_token)
    return [row.text for row in batch]


def reference(decoder: Decoder, prompt: str, new_tokens: int = 24) -> str:
    """Return what transformers' own generate() adds to the prompt."""
    prompt_tokens, tokens = reference_tokens(decoder, prompt, max(new_tokens, 24))
    text = decoder.tokenizer.decode(
        tokens[: prompt_tokens + new_tokens], skip_special_tokens=True, clean_up_tokenization_spaces=False
    )
    assert text.startswith(prompt)
    return text.removeprefix(prompt)


@functools.cache
def reference_tokens(decoder: Decoder, prompt: str, new_tokens: int) -> tuple[int, torch.Tensor]:
    """Return the prompt's number of tokens and those of a greedy run; shorter runs are its beginnings."""
    encoded = decoder.tokenizer(prompt, return_tensors="pt", return_token_type_ids=False)
    options = {"max_new_tokens": new_tokens, "do_sample": False, "pad_token_id": 0}
    tokens = decoder.model.generate(**encoded, **options, eos_token_id=sorted(decoder.end_tokens))
    return encoded["input_ids"].shape[1], tokens[0]


FAST = ("falcon", "mistral", "persimmon", "gemma3_text", "gpt_oss", "qwen3_5_text")
SLOW = [pytest.param(kind, marks=pytest.mark.slow) for kind in language.MODERN if kind not in FAST]


@pytest.mark.parametrize("kind", [*FAST, *SLOW])
def test_texts_of_a_batch_equal_those_generated_alone(tmp_path, kind):
    decoder = load(language.save_decoder(tmp_path, kind))
    expected = [reference(decoder, prompt) for prompt in PROMPTS]
    assert [generate(decoder, rows(decoder, [prompt]))[0] for prompt in PROMPTS] == expected
    assert generate(decoder, rows(decoder, PROMPTS)) == expected


@pytest.mark.parametrize("kind", ["rwkv", "xlnet", "minimax"])
def test_texts_that_a_batch_would_change_run_alone(tmp_path, kind):
    decoder = load(language.save_decoder(tmp_path, kind))
    expected = [reference(decoder, prompt) for prompt in PROMPTS]
    texts = rows(decoder, PROMPTS)
    for batch in decoder.batches(texts):
        generate(decoder, batch)
    assert [row.text for row in texts] == expected


@pytest.mark.parametrize(("kind", "context"), [("xlnet", None), ("roberta", 254), ("mixtral", 256)])
def test_context_is_that_of_the_table_of_positions_if_there_is_one(tmp_path, kind, context):
    """XLNet has no limit, and RoBERTa's first positions are for padding."""
    assert load(language.save_decoder(tmp_path, kind)).context == context


def test_text_that_would_turn_the_positions_of_others_runs_apart(tmp_path):
    decoder = load(language.save_longrope(tmp_path))
    prompts = ["a 1 " * 20, "It", "I am"]
    batch = rows(decoder, prompts)
    assert len(batch[0].prompt_tokens) > 64 - 24
    batches = decoder.batches(batch)
    for part in batches:
        decoder.generate(part, lambda: None)
    assert [row.text for row in batch] == [reference(decoder, prompt) for prompt in prompts]


def test_long_prompt_and_long_answer_run_apart(gpt2, monkeypatch):
    """Split a batch that would exceed the context, although every row fits alone."""
    monkeypatch.setattr(gpt2, "token_cost", 0.0)  # padding costs nothing
    monkeypatch.setattr(gpt2, "context", 96)
    prompts = ["a 1 " * 20, "It", "I am"]
    lengths = (5, 40, 3)
    batch = rows(gpt2, prompts, *(options(max_new_tokens=n) for n in lengths))
    assert len(batch[0].prompt_tokens) > gpt2.context - 40
    batches = gpt2.batches(batch)
    assert sorted(map(len, batches)) == [1, 2]
    for part in batches:
        gpt2.generate(part, lambda: None)
    expected = [reference(gpt2, prompt, n) for prompt, n in zip(prompts, lengths, strict=True)]
    assert [row.text for row in batch] == expected
    assert gpt2.batches(batch[1:]) == [batch[1:]]
    assert gpt2.batches([]) == []


def test_batches_weigh_padding_against_steps(gpt2, monkeypatch):
    prompts = ["It", "a 1 " * 40, "I am", "a 1 " * 41]
    batch = rows(gpt2, prompts, *(options(max_new_tokens=n) for n in (8, 8, 8, 8)))
    monkeypatch.setattr(gpt2, "step_cost", 1.0)
    monkeypatch.setattr(gpt2, "token_cost", 1.0)
    apart = [[row.prompt for row in part] for part in gpt2.batches(batch)]
    assert apart == [["It", "I am"], [prompts[1], prompts[3]]]
    monkeypatch.setattr(gpt2, "token_cost", 0.001)
    assert [len(part) for part in gpt2.batches(batch)] == [4]


@pytest.mark.parametrize(
    ("stops", "text", "length"),
    [(["abc"], "xxab", 2), (["abc"], "xabx", 0), (["abc", "bcd"], "bc", 2), (["aab"], "aaa", 2), ([], "a", 0)],
)
def test_partial_stop_string_at_the_end_is_held_back(stops, text, length):
    assert partial_stop_length(stops, text) == length


@pytest.mark.parametrize(
    ("sampling", "expected"),
    [
        # 0.64 and 0.24 of the probability: the token that passes 0.7 is kept.
        ({"temperature": 1.0, "top_p": 0.7}, {0: 0.73, 3: 0.27}),
        ({"temperature": 1.0}, {0: 0.64, 1: 0.03, 2: 0.09, 3: 0.24}),
        ({"temperature": 1.0, "top_k": 2}, {0: 0.73, 3: 0.27}),
        # As in vLLM, top_p is a share of what min_p and top_k leave.
        ({"temperature": 1.0, "top_k": 2, "top_p": 0.7}, {0: 1.0}),
        ({"temperature": 1.0, "min_p": 0.1}, {0: 0.66, 2: 0.09, 3: 0.25}),
        ({"temperature": 3.0, "min_p": 0.6}, {0: 0.58, 3: 0.42}),
        ({"temperature": 1e-38}, {0: 1.0}),
    ],
)
def test_draw_follows_temperature_and_top_p(sampling, expected):
    scores = torch.tensor([3.0, 0.0, 1.0, 2.0])
    other = options(temperature=9.0, top_p=0.5)
    numbers = torch.rand(4000, generator=torch.Generator().manual_seed(1)).tolist()
    tokens = draw(scores.expand(4000, -1), [other, options(**sampling)] * 2000, numbers)[1::2].tolist()
    assert {token: tokens.count(token) / 2000 for token in set(tokens)} == pytest.approx(expected, abs=0.03)


def test_size_is_known_before_loading(tmp_path):
    folder = language.save_gpt2(tmp_path)
    stored = stored_weights(folder)
    numbers = sum(weight.numel() for weight in AutoModelForCausalLM.from_pretrained(folder).parameters())
    assert stored == {"F32": numbers}
    assert chosen_dtype("auto", stored) is torch.float32
    assert size(stored, torch.bfloat16) == 2 * numbers
    with pytest.raises(ConfigError, match=r"big takes about 14\.4 GB and 5\.1 GB of memory are free here"):
        check_it_fits("big", 14.4e9, int(5.1e9))


@pytest.mark.parametrize(
    ("parameters", "dtype"),
    [({}, torch.bfloat16), ({"dtype": "float32"}, torch.float32), ({"dtype": "float16"}, torch.float16)],
)
def test_float16_weights_become_bfloat16_on_a_cpu(tmp_path, parameters, dtype):
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


# --- the exporter -----------------------------------------------------------------------------------------------------


def job(weights, folder, system: str = "mymodel", **more) -> Job:
    return Job(system, "text-generation", "python", weights, False, folder, **more)


def parsed(path) -> ModelConfig:
    return text_format.Parse(path.read_text(), ModelConfig())


def test_committed_configs_equal_generated_ones(tmp_path):
    assemble(job(language.save_gpt2(tmp_path / "weights"), tmp_path / "assembled"))
    for suffix in ("", "_stream"):
        generated = parsed(tmp_path / f"assembled/mymodel{suffix}/config.pbtxt")
        for system in ("falcon7b", "mistral7b", "persimmon8b"):
            generated.name = f"{system}{suffix}"
            name, value = ("weights", system) if suffix else ("engine_model", f"{system}_stream")
            generated.parameters[name].string_value = value
            assert parsed(ROOT / f"model_repository/{system}{suffix}/config.pbtxt") == generated


def test_only_needed_files_are_copied(tmp_path):
    weights = language.save_mistral(tmp_path / "weights")
    for name in ("consolidated.safetensors", "pytorch_model.bin", "modeling_custom.py", "README.md"):
        (weights / name).touch()
    assemble(job(weights, tmp_path / "assembled"))
    copied = {file.name for file in (tmp_path / "assembled/mymodel/1").iterdir()}
    assert {"config.json", "model.safetensors", "tokenizer.json"} <= copied
    assert not copied & {"consolidated.safetensors", "pytorch_model.bin", "modeling_custom.py", "README.md"}
    assert list((tmp_path / "assembled/mymodel_stream/1").iterdir()) == []

    assemble(job(weights, tmp_path / "trusted", trust_remote_code=True))
    assert (tmp_path / "trusted/mymodel/1/modeling_custom.py").exists()
    assert parsed(tmp_path / "trusted/mymodel_stream/config.pbtxt").parameters["trust_remote_code"].string_value == "1"


@pytest.mark.parametrize(("kind", "reason"), [("llama", ""), ("minimax", "padding changes"), ("rwkv", "runs alone")])
def test_texts_that_a_batch_would_change_are_named(tmp_path, kind, reason):
    outcome = assemble(job(language.save_decoder(tmp_path / "weights", kind), tmp_path / "assembled"))
    assert (" its texts, so " in outcome.summary) == bool(reason)
    assert reason in outcome.summary


def test_model_that_fails_in_a_batch_runs_alone(gpt2, monkeypatch):
    generate = gpt2.model.generate

    def of_one_row(tokens, **options):
        if len(tokens) > 1:
            raise RuntimeError("shape mismatch")
        return generate(tokens, **options)

    monkeypatch.setattr(gpt2.model, "generate", of_one_row)
    monkeypatch.setattr(gpt2, "shares", "all")
    gpt2.measure()
    assert [len(batch) for batch in gpt2.batches(rows(gpt2, PROMPTS[:2]))] == [1, 1]


def test_model_that_does_not_fit_here_is_not_tried(tmp_path, monkeypatch):
    monkeypatch.setattr(openvino, "free_memory", lambda: 10_000)
    outcome = assemble(job(language.save_decoder(tmp_path / "weights", "rwkv"), tmp_path / "assembled"))
    assert "not tried, because it takes more memory than is free here" in outcome.summary
    assert "runs alone" not in outcome.summary


def test_model_that_cannot_run_is_refused(tmp_path):
    weights = language.save_decoder(tmp_path / "weights", "recurrent_gemma")
    own = job(weights, tmp_path / "assembled")
    with pytest.raises(UserError, match=r"the original failed on .* \(ValueError in transformers: .*get_seq"):
        run_recipe(RECIPES[own.task], own, "x")


def test_defaults_that_a_server_lacks_are_named(tmp_path):
    weights = language.save_gpt2(tmp_path / "weights")
    asked = {"repetition_penalty": 1.2, "num_beams": 4, "typical_p": 1.0, "suppress_tokens": []}
    (weights / "generation_config.json").write_text(json.dumps(asked))
    outcome = assemble(job(weights, tmp_path / "assembled"))
    assert "clients of the gateway get repetition_penalty 1.2 by default" in outcome.summary
    assert "generation_config.json asks for num_beams 4, which has no effect here" in outcome.summary


def test_sharded_weights_are_copied(tmp_path):
    weights = language.save_falcon(tmp_path / "weights")
    AutoModelForCausalLM.from_pretrained(weights).save_pretrained(weights, max_shard_size="50KB")
    (weights / "model.safetensors").unlink()
    assemble(job(weights, tmp_path / "assembled"))
    folder = tmp_path / "assembled/mymodel/1"
    assert len(list(folder.glob("model-*.safetensors"))) > 1
    assert sum(stored_weights(folder).values()) == sum(
        w.numel() for w in AutoModelForCausalLM.from_pretrained(folder).parameters()
    )


def test_sentencepiece_tokenizer_is_converted(tmp_path):
    """Convert a tokenizer that has only a tokenizer.model, like persimmon8b's."""
    source = language.save_persimmon(tmp_path / "source")
    for file in source.glob("*token*"):
        file.unlink()
    (tmp_path / "lines.txt").write_text(language.LINES)
    sentencepiece.SentencePieceTrainer.train(
        input=str(tmp_path / "lines.txt"), model_prefix=str(source / "tokenizer"), vocab_size=90
    )
    (source / "tokenizer_config.json").write_text('{"tokenizer_class": "LlamaTokenizer"}')
    assemble(Job("story", "text-generation", "python", source, False, tmp_path / "assembled"))
    (tmp_path / "assembled/story/1/tokenizer.model").unlink(missing_ok=True)
    served = AutoTokenizer.from_pretrained(tmp_path / "assembled/story/1")
    original = AutoTokenizer.from_pretrained(source)
    assert served("It was raining, schönes Wetter").input_ids == original("It was raining, schönes Wetter").input_ids
    assert len(served("It was raining").input_ids) > 3


def test_index_cannot_name_files_elsewhere(tmp_path):
    source, secret = language.save_falcon(tmp_path / "source"), tmp_path / "secret.safetensors"
    (source / "model.safetensors").rename(secret)
    for number, name in enumerate((str(secret), "../secret.safetensors", "config.json")):
        (source / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"x": name}}))
        with pytest.raises(UserError, match=r"which is not a \*\.safetensors file in the same folder"):
            assemble(Job("story", "text-generation", "python", source, True, tmp_path / str(number)))
    assert secret.exists()
    (source / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"x": str(secret)}}))
    with pytest.raises(FileNotFoundError):  # the server does not read them either
        stored_weights(source)


def test_repetition_penalty_of_the_checkpoint_is_ignored(tmp_path):
    """Ignore it, because generate() would penalize a row's padding too."""
    folder = language.save_gpt2(tmp_path)
    path = folder / "generation_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"repetition_penalty": 3.0, "max_time": 0.001}))
    decoder = Decoder(AutoModelForCausalLM.from_pretrained(folder), AutoTokenizer.from_pretrained(folder))
    assert decoder.model.generation_config.repetition_penalty in (None, 1.0)
    assert decoder.model.generation_config.max_time is None


def test_model_without_language_head_is_refused(tmp_path):
    source = language.save_mistral(tmp_path / "source")
    config = json.loads((source / "config.json").read_text())
    (source / "config.json").write_text(json.dumps(config | {"architectures": ["MistralForSequenceClassification"]}))
    with pytest.raises(UserError, match="which has no language-model head"):
        assemble(Job("story", "text-generation", "python", source, False, tmp_path / "assembled"))
