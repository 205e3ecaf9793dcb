"""Each kind of model answers alike on OpenVINO and on ONNX Runtime, alone and in a batch."""

from __future__ import annotations

import numpy as np
import pytest

from export.check.served import served_system
from tests.support.checkpoints import encoders, language, vision
from tests.support.served import assemble
from triton_transformers.corpus import MIXED

pytestmark = pytest.mark.usefixtures("stored")

TEXTS = [*MIXED.texts[:8], "a", "", "word " * 100]
IMAGES = [np.random.default_rng(0).integers(0, 256, (1, 40, 30, 3)).astype(np.float32) for _ in range(3)]
TEXT_REQUESTS = [{"input_text": np.array([[text.encode()]], np.object_)} for text in TEXTS]
IMAGE_REQUESTS = [{"image": image} for image in IMAGES]


# name -> (task, function that saves the weights, requests)
CASES = {
    "bert": ("text-classification", lambda f: encoders.save_bert(f, "ForSequenceClassification"), TEXT_REQUESTS),
    "roberta": ("token-classification", lambda f: encoders.save_roberta(f, "ForTokenClassification"), TEXT_REQUESTS),
    "sentence": ("sentence-similarity", encoders.save_sentence_transformer, TEXT_REQUESTS),
    "distilbert": ("feature-extraction", lambda f: encoders.save_distilbert(f, "Model"), TEXT_REQUESTS),
    "qwen3": ("feature-extraction", lambda f: encoders.save_qwen3(f, "Model"), TEXT_REQUESTS[:9]),
    "llama": ("text-classification", language.save_llama_classifier, TEXT_REQUESTS[:9]),
    "splade": ("sparse-embedding", encoders.save_sparse_encoder, TEXT_REQUESTS),
    "vit": ("image-classification", vision.save_vit_classifier, IMAGE_REQUESTS),
    "dinov2": ("image-feature-extraction", vision.save_dinov2, IMAGE_REQUESTS),
}
QUICK = ("bert", "roberta", "vit")


@pytest.mark.parametrize(
    "case", [name if name in QUICK else pytest.param(name, marks=pytest.mark.slow) for name in CASES]
)
def test_openvino_answers_like_onnxruntime(tmp_path, case):
    task, save, requests = CASES[case]
    assemble(save(tmp_path / "weights"), tmp_path, task=task)
    with served_system("m", tmp_path) as system:
        expected = system.alone(requests)
    with served_system("m", tmp_path, "openvino-f32") as system:
        networks = [model for model in system.models.values() if getattr(model, "engine_labels", None)]
        assert [model.engine_labels["engine"] for model in networks] == ["openvino"]
        answers = zip(expected, system.alone(requests), system.together(requests), strict=True)
    for reference, alone, together in answers:
        for name in reference:
            for answer in (alone[name], together[name]):
                if case == "splade" and answer.dtype != np.float32:
                    # Tokens come by weight, and those whose weights differ by a rounding error may change places.
                    assert list(map(sorted, answer.tolist())) == list(map(sorted, reference[name].tolist()))
                elif answer.dtype == np.object_ or np.issubdtype(answer.dtype, np.integer):
                    assert answer.tolist() == reference[name].tolist()
                else:
                    np.testing.assert_allclose(answer, reference[name], atol=1e-4)
