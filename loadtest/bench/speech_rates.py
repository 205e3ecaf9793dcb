"""Recognize speech: this server with 16 clients, and transformers' pipeline in this process.

The network has the size of Whisper base and random weights, so each answer has as many tokens as it may.
"""

from __future__ import annotations

import base64
import io
import json
import tempfile
import time
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np

from loadtest.bench.tables import in_turns, ratios, spread
from loadtest.server.own_stack import OwnStack, folder
from triton_transformers.cli import out, print_table
from triton_transformers.corpus import MIXED
from triton_transformers.load import JSON

CLIENTS, ROUNDS, RATE = 16, 3, 16_000
SECONDS = (4, 6, 8, 9, 10, 11, 13, 15)  # of the sounds; the mean is 9.5
NEW_TOKENS = 32  # for so many seconds of speech
PARAMETERS = {"generate_kwargs": {"max_new_tokens": NEW_TOKENS}}
SYSTEM = "speech"
ONE_AT_A_TIME, TOGETHER, SERVED = "pipeline(), one at a time", f"pipeline(), batches of {CLIENTS}", "this project"
BASE = {
    "d_model": 512, "encoder_layers": 6, "decoder_layers": 6, "encoder_attention_heads": 8,
    "decoder_attention_heads": 8, "encoder_ffn_dim": 2048, "decoder_ffn_dim": 2048, "max_target_positions": 448,
}  # fmt: skip


def run() -> None:
    with folder() as work:
        save_whisper(work / "checkpoint", 51_865, **BASE)
        stack = OwnStack(work, SYSTEMS=SYSTEM)
        stack.command("models", SOURCE=f"{work}/checkpoint")
        sounds = [sound(number) for number in range(CLIENTS)]
        with stack.serving():
            url = f"{stack.url('TRITON_HTTP_PORT')}/v2/models/{SYSTEM}/infer"
            show(measure(work / "checkpoint", url, sounds))


def measure(checkpoint: Path, url: str, sounds: list[np.ndarray]) -> dict[str, list[float]]:
    """Return the seconds of sound per second of each way and round."""
    import transformers

    pipe: Any = transformers.pipeline("automatic-speech-recognition", model=str(checkpoint))
    files = [wav(samples) for samples in sounds]

    def recognize(batch_size: int) -> list[str]:
        answers = pipe([samples.copy() for samples in sounds], batch_size=batch_size, **PARAMETERS)
        return [answer["text"] for answer in answers]

    def ask_all() -> list[str]:
        with ThreadPoolExecutor(CLIENTS) as pool:
            return list(pool.map(lambda file: ask(url, file), files))

    ways = {ONE_AT_A_TIME: lambda: recognize(1), TOGETHER: lambda: recognize(CLIENTS), SERVED: ask_all}
    rates: dict[str, list[float]] = {way: [] for way in ways}
    texts = {}
    for way in in_turns(ways, ROUNDS, f"{len(sounds)} sounds"):
        start = time.perf_counter()
        texts[way] = ways[way]()
        rates[way].append(sum(map(len, sounds)) / RATE / (time.perf_counter() - start))
    same = sum(map(str.__eq__, texts[SERVED], texts[ONE_AT_A_TIME]))
    out.print(f"texts that equal those of {ONE_AT_A_TIME}: {same} of {len(sounds)}")
    return rates


def show(rates: dict[str, list[float]]) -> None:
    rows = [[way, spread(own), spread(ratios(own, rates[ONE_AT_A_TIME]), 2)] for way, own in rates.items()]
    print_table(("", "seconds of sound per second", f"/ {ONE_AT_A_TIME}"), rows, text_columns=("",))
    out.print(
        f"median (minimum to maximum) of {ROUNDS} interleaved rounds; sounds of {min(SECONDS)} to {max(SECONDS)} s, "
        f"{NEW_TOKENS} tokens each; {CLIENTS} clients of this project"
    )


def ask(url: str, file: bytes) -> str:
    contents = {"audio": base64.b64encode(file).decode(), "parameters": json.dumps(PARAMETERS)}
    inputs = [{"name": name, "datatype": "BYTES", "shape": [1, 1], "data": [data]} for name, data in contents.items()]
    request = urllib.request.Request(url, json.dumps({"inputs": inputs}).encode(), JSON)
    with urllib.request.urlopen(request) as response:
        answer: dict[str, str] = json.loads(json.load(response)["outputs"][0]["data"][0])
    return answer["text"]


# --- the sounds and the network ---------------------------------------------------------------------------------------


def sound(number: int) -> np.ndarray:
    """Return tones that change like syllables, with noise."""
    random = np.random.default_rng(number)
    syllables = SECONDS[number % len(SECONDS)] * 4
    pitches = np.repeat(random.uniform(100, 800, syllables), RATE // 4)
    phase = 2 * np.pi * np.cumsum(pitches) / RATE
    return (0.3 * np.sin(phase) + random.normal(0, 0.02, len(phase))).astype(np.float32)


def wav(samples: np.ndarray) -> bytes:
    import soundfile

    file = io.BytesIO()
    soundfile.write(file, samples, RATE, format="WAV", subtype="FLOAT")
    return file.getvalue()


def save_whisper(folder: Path, vocabulary: int, spread: float = 0.02, **sizes: int) -> Path:
    """Save a Whisper of these sizes with random weights, and a tokenizer that knows its languages and tasks."""
    import torch
    import transformers
    from tokenizers import ByteLevelBPETokenizer

    learned = ByteLevelBPETokenizer()
    learned.train_from_iterator(MIXED.texts, vocab_size=min(vocabulary - 1600, 2000), show_progress=False)
    with tempfile.TemporaryDirectory() as work:
        learned.save_model(work)
        tokenizer: Any = transformers.WhisperTokenizer(
            f"{work}/vocab.json", f"{work}/merges.txt", pad_token="<|endoftext|>"
        )
    control = ["<|startoftranscript|>", "<|en|>", "<|fr|>", "<|translate|>", "<|transcribe|>", "<|startoflm|>",
               "<|startofprev|>", "<|nospeech|>", "<|notimestamps|>"]  # fmt: skip
    fillers = vocabulary - len(tokenizer) - len(control) - 1501
    tokenizer.add_tokens([f"word{number}" for number in range(fillers)])
    tokenizer.add_special_tokens({"additional_special_tokens": control})
    tokenizer.add_tokens([f"<|{number / 50:.2f}|>" for number in range(1501)])
    end, (start, english, french, translate, transcribe, *_, silent) = (
        tokenizer.eos_token_id,
        tokenizer.convert_tokens_to_ids(control),
    )
    ids = {"eos_token_id": end, "pad_token_id": end, "bos_token_id": end, "decoder_start_token_id": start}
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(5)
        fields: dict[str, Any] = {"vocab_size": len(tokenizer), "init_std": spread, **ids, **sizes}
        network = transformers.WhisperForConditionalGeneration(transformers.WhisperConfig(**fields))
    network.generation_config = transformers.GenerationConfig(
        **ids, is_multilingual=True, max_length=448, no_timestamps_token_id=silent, return_timestamps=False,
        lang_to_id={"<|en|>": english, "<|fr|>": french}, task_to_id={"translate": translate, "transcribe": transcribe},
        begin_suppress_tokens=[end], alignment_heads=[[0, 0]], prev_sot_token_id=start, max_initial_timestamp_index=50,
    )  # fmt: skip
    network.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    extractor = transformers.WhisperFeatureExtractor(feature_size=network.config.num_mel_bins)
    transformers.WhisperProcessor(extractor, tokenizer).save_pretrained(folder)
    return folder
