"""`embedding`: all-MiniLM-L6-v2 as tokenizer.json and one ONNX graph with pooling and normalisation inside."""

from __future__ import annotations

import logging
import os
import warnings
from pathlib import Path

import numpy as np
import onnx
import onnxruntime as ort
from tokenizers import Tokenizer

from scripts.models.catalogue import Order
from scripts.models.parity import check_cosine
from scripts.settings import ROOT

OUTPUT = "sentence_embedding"
LEAST_COSINE = 0.9999


def assemble(order: Order) -> dict:
    os.environ["HF_HUB_OFFLINE"] = "1"
    weights, folder = order.weights, order.folder
    encoder, tokenizer = folder / "encoder/1", folder / "tokenizer/1"
    for made in (encoder, tokenizer, folder / "embedding/1"):
        made.mkdir(parents=True)
    with quiet():
        from sentence_transformers import SentenceTransformer

        original = SentenceTransformer(str(weights), device="cpu")
        export(weights, encoder / "model.onnx")
    save_tokenizer(weights, original.max_seq_length, tokenizer / "tokenizer.json")
    texts = parity_texts()
    cosine = check_cosine(
        original.encode(texts, batch_size=16, show_progress_bar=False),
        embed(encoder / "model.onnx", tokenizer / "tokenizer.json", texts),
        LEAST_COSINE,
    )
    return {
        "max_length": original.max_seq_length,
        "least_cosine": cosine,
        "parity_texts": len(texts),
        "said": f"cosine with the original at least {cosine:.6f} on {len(texts)} texts",
    }


def export(weights: Path, target: Path) -> None:
    from optimum.exporters.onnx import main_export

    work = target.parent / "export"
    main_export(
        str(weights),
        output=work,
        task="feature-extraction",
        library_name="sentence_transformers",
        do_validation=False,  # parity is checked below, on the committed texts
    )
    model = onnx.load(work / "model.onnx")
    # The token embeddings would be copied out on every run and are asked for by nobody.
    kept = [output for output in model.graph.output if output.name == OUTPUT]
    del model.graph.output[:]
    model.graph.output.extend(kept)
    onnx.checker.check_model(model)
    onnx.save(model, target)
    for file in work.iterdir():
        file.unlink()
    work.rmdir()


def save_tokenizer(weights: Path, max_length: int, target: Path) -> None:
    """The model's tokenizer with the length the model was trained for; the file's own 128 is not the model's."""
    tokenizer = Tokenizer.from_file(str(weights / "tokenizer.json"))
    tokenizer.enable_truncation(max_length)
    pad = tokenizer.padding
    tokenizer.enable_padding(pad_id=pad["pad_id"], pad_type_id=pad["pad_type_id"], pad_token=pad["pad_token"])
    tokenizer.save(str(target))


def embed(model: Path, tokenizer_file: Path, texts: list[str]) -> np.ndarray:
    """What the server will answer, without the server."""
    session = ort.InferenceSession(str(model), providers=["CPUExecutionProvider"])
    tokenizer = Tokenizer.from_file(str(tokenizer_file))
    rows = []
    for first in range(0, len(texts), 16):
        encodings = tokenizer.encode_batch(texts[first : first + 16])
        feed = {
            "input_ids": np.array([e.ids for e in encodings], np.int64),
            "attention_mask": np.array([e.attention_mask for e in encodings], np.int64),
        }
        rows.append(session.run([OUTPUT], feed)[0])
    return np.concatenate(rows)


def parity_texts() -> list[str]:
    """The committed texts, and what they leave out: nothing, one token, and more than the model takes."""
    texts = (ROOT / "loadtest/texts.txt").read_text().splitlines()
    return [*texts, "", " ", "a", "?", "word " * 254, "word " * 255, " ".join(texts[:40]), "漢" * 600]


class quiet(warnings.catch_warnings):
    """The exporters warn about their own internals; whoever assembles a model can do nothing about it."""

    def __enter__(self):
        super().__enter__()
        warnings.simplefilter("ignore")
        logging.disable(logging.WARNING)

    def __exit__(self, *exception):
        logging.disable(logging.NOTSET)
        return super().__exit__(*exception)
