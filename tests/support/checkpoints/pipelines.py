"""Save a small random checkpoint for each task of transformers' pipelines, with a real architecture and processors."""

from __future__ import annotations

import io
import json
import string
import tempfile
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
import transformers
from tokenizers import ByteLevelBPETokenizer

from loadtest.bench.architectures.small_models import LABELS, SIDE, byte_level, decoder, small_fields, wordpiece
from tests.support.checkpoints import encoders
from triton_transformers.corpus import MIXED

SQUARE = {"height": SIDE, "width": SIDE}
LAYERS = {"encoder_layers": 2, "decoder_layers": 2}
# More positions than the 256 tokens that pipelines generate.
GENERATES = LAYERS | {"max_position_embeddings": 300}
CONVOLUTIONS = {
    "conv_dim": (8, 8, 8), "conv_stride": (5, 4, 4), "conv_kernel": (10, 8, 8), "num_feat_extract_layers": 3,
    "num_conv_pos_embeddings": 16, "num_conv_pos_embedding_groups": 2, "mask_time_length": 2,
}  # fmt: skip
DETR = {
    "backbone_config": {"model_type": "resnet", "embedding_size": 8, "hidden_sizes": [8, 16], "depths": [1, 1],
                        "layer_type": "basic", "out_features": ["stage2"]},
    "use_timm_backbone": False, "use_pretrained_backbone": False, "backbone": None, "num_queries": 5, **LAYERS,
    "encoder_attention_heads": 4, "decoder_attention_heads": 4,
}  # fmt: skip
NLI = {
    "id2label": {0: "contradiction", 1: "neutral", 2: "entailment"},
    "label2id": {"contradiction": 0, "neutral": 1, "entailment": 2},
}
HEARS = partial(transformers.Wav2Vec2FeatureExtractor, return_attention_mask=True)


@dataclass(frozen=True)
class SmallPipeline:
    """A task, the class of its network, the fields of its config and the makers of its processors."""

    task: str
    architecture: str
    fields: dict[str, Any] = field(default_factory=dict)
    processors: tuple[Callable[[], Any], ...] = (wordpiece,)
    chosen: bool = False  # TASK= chooses it among several
    spread: float = 0.3

    def save(self, folder: Path) -> Path:
        network = getattr(transformers, self.architecture)
        processors = [make() for make in self.processors]
        tokenizer = next((made for made in processors if hasattr(made, "vocab_size")), None)
        tokenizer = tokenizer or next((made.tokenizer for made in processors if hasattr(made, "tokenizer")), None)
        sizes = {"vocab_size": len(tokenizer) if tokenizer else 40, "max_position_embeddings": 200}
        for name in ("pad", "bos", "eos"):
            if tokenizer is not None and (number := getattr(tokenizer, f"{name}_token_id")) is not None:
                sizes[f"{name}_token_id"] = number
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(5)
            config = network.config_class(**merged(small_fields(network.config_class, sizes), self.fields))
            made = network(config)
            for weight in made.parameters():
                if weight.ndim > 1:
                    torch.nn.init.normal_(weight, std=self.spread)
            made.save_pretrained(folder)
        for made in processors:
            made.save_pretrained(folder)
        return folder


def merged(base: dict[str, Any], own: dict[str, Any]) -> dict[str, Any]:
    both = {
        name: merged(base[name], value)
        for name, value in own.items()
        if isinstance(value, dict) and isinstance(base.get(name), dict)
    }
    return base | own | both


def characters() -> Any:
    """Return a tokenizer of letters for speech."""
    tokens = ["<pad>", "<s>", "</s>", "<unk>", "|", *string.ascii_uppercase]
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "vocab.json"
        path.write_text(json.dumps({token: number for number, token in enumerate(tokens)}))
        return transformers.Wav2Vec2CTCTokenizer(str(path))


def tapas_tokenizer() -> Any:
    plain = wordpiece()
    with tempfile.TemporaryDirectory() as folder:
        words = sorted(plain.get_vocab(), key=plain.convert_tokens_to_ids)
        (Path(folder) / "vocab.txt").write_text("\n".join([*words, "[EMPTY]"]))
        return transformers.TapasTokenizer(str(Path(folder) / "vocab.txt"), model_max_length=200)


def clip_tokenizer() -> Any:
    return encoders.clip_bpe()


def pieces(kind: str, size: int, file: Path) -> Path:
    """Train a model of SentencePiece, as tokenizers without a tokenizer.json have it."""
    import sentencepiece

    model = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(MIXED.texts), model_writer=model, vocab_size=size, model_type=kind, minloglevel=2,
        hard_vocab_limit=False, bos_id=0, pad_id=1, eos_id=2, unk_id=3,
    )  # fmt: skip
    file.write_bytes(model.getvalue())
    return file


def marian() -> Any:
    import sentencepiece

    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        spm = str(pieces("unigram", 1000, folder / "source.spm"))
        trained = sentencepiece.SentencePieceProcessor(model_file=spm)
        special = ["</s>", "<unk>", "<pad>"]
        words = [trained.id_to_piece(number) for number in range(4, trained.get_piece_size())]
        vocabulary = {word: number for number, word in enumerate(dict.fromkeys([*special, *words]))}
        (folder / "vocab.json").write_text(json.dumps(vocabulary))
        return transformers.MarianTokenizer(spm, spm, str(folder / "vocab.json"))


def nllb() -> Any:
    """Return a tokenizer that must be told the languages."""
    with tempfile.TemporaryDirectory() as folder:
        trained = ByteLevelBPETokenizer()
        special = ["<s>", "<pad>", "</s>", "<unk>"]
        trained.train_from_iterator(MIXED.texts, vocab_size=600, special_tokens=special, show_progress=False)
        vocabulary, merges = trained.save_model(folder)
        pairs = [tuple(line.split()) for line in Path(merges).read_text().splitlines()[1:]]
        return transformers.NllbTokenizer(json.loads(Path(vocabulary).read_text()), pairs)


def reads_aloud() -> Any:
    with tempfile.TemporaryDirectory() as folder:
        return transformers.SpeechT5Tokenizer(str(pieces("char", 60, Path(folder) / "spm_char.model")))


class Vocoder:
    """Saves the network that makes sound of the spectrograms beside it."""

    def save_pretrained(self, folder: Path) -> None:
        config = transformers.SpeechT5HifiGanConfig(model_in_dim=8, upsample_initial_channel=16)
        transformers.SpeechT5HifiGan(config).save_pretrained(folder / "vocoder")


def hears_short() -> Any:
    """Return a feature extractor whose answers are the same each time: it cuts no random part of a sound."""
    return transformers.ClapFeatureExtractor(truncation="rand_trunc", padding="repeatpad")


def generates() -> Any:
    return decoder(ends=True)


def captions() -> Any:
    """Return a processor without a chat template."""
    return transformers.BlipProcessor(transformers.BlipImageProcessor(size=SQUARE), wordpiece())


def reads_lines() -> Any:
    return transformers.TrOCRProcessor(transformers.ViTImageProcessor(size=SQUARE), generates())


def chats() -> Any:
    tokenizer = decoder()
    tokenizer.add_tokens(["Yes", "No"])
    tokenizer.chat_template = (
        "{% for message in messages %}{{ message['role'] }}: {{ message['content'] }}\n{% endfor %}"
        "{% if add_generation_prompt %}assistant: {% endif %}"
    )
    return tokenizer


def image_processor(name: str, **options: Any) -> Callable[[], Any]:
    return lambda: getattr(transformers, name)(**options)


TOWERS = {
    "text_config": {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4},
    "vision_config": {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
                      "image_size": SIDE, "patch_size": 8},
    "projection_dim": 16,
}  # fmt: skip
SEEING = {
    "text_config": TOWERS["text_config"] | {
        "vocab_size": 700, "max_position_embeddings": 200, "encoder_hidden_size": 32,
        "bos_token_id": 2, "sep_token_id": 3, "eos_token_id": 3, "pad_token_id": 0,
    },
    "vision_config": TOWERS["vision_config"], "projection_dim": 16,
}  # fmt: skip
CLAP = {
    "text_config": {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
                    "projection_dim": 16},
    "audio_config": {"hidden_size": 64, "patch_embeds_hidden_size": 8, "depths": [1, 1, 1, 1],
                     "num_attention_heads": [1, 1, 1, 1], "window_size": 4, "projection_dim": 16},
    "projection_dim": 16,
}  # fmt: skip
WRITES = {"vocab_size": 600, "is_decoder": True, "add_cross_attention": True, "eos_token_id": 2, "bos_token_id": 1}
SEES_AND_WRITES = {
    "encoder": TOWERS["vision_config"] | {"model_type": "vit"}, "decoder_start_token_id": 1, "eos_token_id": 2,
    "pad_token_id": 0, "tie_word_embeddings": False,
}  # fmt: skip
STARTS = {"decoder_start_token_id": 1, "forced_eos_token_id": 2}

SMALL_PIPELINES = (
    SmallPipeline("audio-classification", "Wav2Vec2ForSequenceClassification", LABELS | CONVOLUTIONS, (HEARS,)),
    SmallPipeline("automatic-speech-recognition", "Wav2Vec2ForCTC", CONVOLUTIONS, (HEARS, characters)),
    SmallPipeline("text-to-audio", "VitsModel",
                  {"upsample_initial_channel": 16, "flow_size": 16, "spectrogram_bins": 17, "wavenet_dilation_rate": 1,
                   "posterior_encoder_num_wavenet_layers": 2, "prior_encoder_num_flows": 1,
                   "duration_predictor_num_flows": 1, "duration_predictor_filter_channels": 16,
                   "hidden_size": 16, "num_attention_heads": 2, "ffn_dim": 32, "noise_scale": 0.0,
                   "noise_scale_duration": 0.0},
                  (wordpiece,), spread=0.05),
    SmallPipeline("text-to-audio", "SpeechT5ForTextToSpeech",
                  {"speech_decoder_prenet_units": 16, "speech_decoder_prenet_layers": 1, "num_mel_bins": 8,
                   "speech_decoder_postnet_units": 16, "speech_decoder_postnet_layers": 1, "speaker_embedding_dim": 16,
                   "speech_decoder_prenet_dropout": 0.0, "conv_dim": (8,), "conv_stride": (5,), "conv_kernel": (10,),
                   "num_feat_extract_layers": 1, **LAYERS}, (reads_aloud, Vocoder), spread=0.05),
    SmallPipeline("table-question-answering", "TapasForQuestionAnswering", {"num_aggregation_labels": 0},
                  (tapas_tokenizer,)),
    SmallPipeline("document-question-answering", "LayoutLMForQuestionAnswering",
                  {"max_2d_position_embeddings": 1024}),
    SmallPipeline("zero-shot-classification", "BertForSequenceClassification", NLI, chosen=True),
    SmallPipeline("zero-shot-image-classification", "CLIPModel", TOWERS,
                  (clip_tokenizer, image_processor("CLIPImageProcessor", size={"shortest_edge": SIDE},
                                                   crop_size=SQUARE)), chosen=True),
    SmallPipeline("zero-shot-audio-classification", "ClapModel", CLAP, (byte_level, hears_short)),
    SmallPipeline("image-segmentation", "SegformerForSemanticSegmentation",
                  LABELS | {"num_encoder_blocks": 4, "depths": [1, 1, 1, 1], "hidden_sizes": [8, 8, 16, 16],
                            "num_attention_heads": [1, 1, 2, 2], "decoder_hidden_size": 16},
                  (image_processor("SegformerImageProcessor", size=SQUARE),)),
    # It builds its loss, which needs SciPy, also for inference.
    SmallPipeline("image-segmentation", "Mask2FormerForUniversalSegmentation",
                  LABELS | {"backbone_config": {"model_type": "swin", "image_size": 64, "patch_size": 4, "embed_dim": 8,
                                                "depths": [1, 1, 1, 1], "num_heads": [1, 1, 2, 2], "window_size": 4,
                                                "out_features": ["stage1", "stage2", "stage3", "stage4"]},
                            "feature_size": 32, "mask_feature_size": 32, "hidden_dim": 32, "dim_feedforward": 64,
                            "encoder_feedforward_dim": 64, "encoder_layers": 1, "decoder_layers": 2,
                            "num_attention_heads": 4, "num_queries": 5, "train_num_points": 16},
                  (image_processor("Mask2FormerImageProcessor", size={"height": 64, "width": 64}, ignore_index=255),)),
    SmallPipeline("object-detection", "DetrForObjectDetection", LABELS | DETR,
                  (image_processor("DetrImageProcessor", size={"shortest_edge": 64, "longest_edge": 96}),)),
    SmallPipeline("zero-shot-object-detection", "OwlViTForObjectDetection", TOWERS | {"projection_dim": 32},
                  (clip_tokenizer, image_processor("OwlViTImageProcessor", size=SQUARE, crop_size=SQUARE))),
    SmallPipeline("decision", "LlamaForCausalLM", {}, (chats,), chosen=True),
    SmallPipeline("depth-estimation", "DPTForDepthEstimation",
                  {"num_hidden_layers": 4, "backbone_out_indices": [0, 1, 2, 3],
                   "neck_hidden_sizes": [8, 8, 16, 16], "fusion_hidden_size": 8,
                   "hidden_size": 32, "image_size": SIDE, "patch_size": 8, "is_hybrid": False},
                  (image_processor("DPTImageProcessor", size=SQUARE),)),
    SmallPipeline("video-classification", "VideoMAEForVideoClassification",
                  LABELS | {"num_frames": 4, "image_size": SIDE, "patch_size": 8},
                  (image_processor("VideoMAEImageProcessor", size={"shortest_edge": SIDE}, crop_size=SQUARE),)),
    SmallPipeline("mask-generation", "SamModel",
                  {"vision_config": {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4,
                                     "image_size": 64, "patch_size": 16, "mlp_dim": 64, "output_channels": 16,
                                     "num_pos_feats": 8, "window_size": 2, "global_attn_indexes": [1]},
                   "prompt_encoder_config": {"hidden_size": 16, "image_size": 64, "patch_size": 16},
                   "mask_decoder_config": {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2,
                                           "mlp_dim": 32, "iou_head_hidden_dim": 16}},
                  (image_processor("SamImageProcessor", size={"longest_edge": 64}, pad_size={"height": 64, "width": 64},
                                   mask_size={"longest_edge": 16}, mask_pad_size={"height": 16, "width": 16}),)),
    SmallPipeline("image-text-to-text", "BlipForConditionalGeneration", SEEING, (captions,)),
    SmallPipeline("image-to-text", "VisionEncoderDecoderModel", SEES_AND_WRITES | {
        "decoder": {"model_type": "gpt2", "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 300} | WRITES,
    }, (generates, image_processor("ViTImageProcessor", size=SQUARE))),
    SmallPipeline("keypoint-matching", "LightGlueForKeypointMatching",
                  {"keypoint_detector_config": {"model_type": "superpoint", "encoder_hidden_sizes": [8, 8, 16, 16],
                                                "decoder_hidden_size": 16, "keypoint_decoder_dim": 65,
                                                "descriptor_decoder_dim": 16, "keypoint_threshold": 0.0,
                                                "max_keypoints": 16, "border_removal_distance": 4},
                   "descriptor_dim": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "filter_threshold": 0.0,
                   "hidden_size": 16, "intermediate_size": 32},
                  (image_processor("LightGlueImageProcessor", size={"height": 64, "width": 64}),)),
    SmallPipeline("translation", "MarianMTModel", GENERATES | {"decoder_start_token_id": 2, "forced_eos_token_id": 0},
                  (marian,)),
    SmallPipeline("translation", "M2M100ForConditionalGeneration", LAYERS | STARTS, (nllb,)),
    SmallPipeline("summarization", "BartForConditionalGeneration",
                  GENERATES | STARTS | {"task_specific_params": {"summarization": {}}}, (generates,)),
    SmallPipeline("text2text-generation", "T5ForConditionalGeneration",
                  {"decoder_start_token_id": 0, "num_layers": 3, "num_decoder_layers": 1}, (generates,)),
)  # fmt: skip

# Another decoder, and a processor that transformers' own pipelines take.
TROCR = SmallPipeline(
    "image-to-text",
    "VisionEncoderDecoderModel",
    SEES_AND_WRITES
    | {
        "decoder": {"model_type": "trocr", "d_model": 32, "decoder_layers": 2, "decoder_attention_heads": 4}
        | {"decoder_ffn_dim": 64, "cross_attention_hidden_size": 32, "max_position_embeddings": 300}
        | WRITES
    },
    (reads_lines,),
)


def find_pipeline(task: str, architecture: str = "") -> SmallPipeline:
    return next(small for small in SMALL_PIPELINES if small.task == task and architecture in small.architecture)
