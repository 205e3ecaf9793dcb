"""The tasks of images and videos."""

from __future__ import annotations

from typing import Any

from triton_transformers.protocol import IMAGE
from triton_transformers.tasks.task import CANDIDATES, FEW_TOKENS, LABELS, ONNX, OPTIONS, PIPELINE, SAMPLING, Hub, Task
from triton_transformers.tasks.texts import SORTS

FIELDS = {"image": "image"}
# The inputs of systems that another recipe serves. Their input `image` has pixels.
INPUTS = {IMAGE: ""}


def scored(answer: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the masks without the score null of models that give none, which clients refuse."""
    return [{name: value for name, value in mask.items() if value is not None} for mask in answer]


TASKS = {
    "image-classification": Task(
        "classifies images",
        FIELDS,
        LABELS,
        drawing="labels",
        recipe="vision",
        formats=(*ONNX, PIPELINE),
        heads=("ForImageClassification",),
        inputs=INPUTS,
        outputs=("label", "score"),
    ),
    "image-feature-extraction": Task(
        "turns an image into vectors",
        FIELDS,
        "pool",
        recipe="vision",
        formats=(*ONNX, PIPELINE),
        inputs=INPUTS,
    ),
    "zero-shot-image-classification": Task(
        "sorts an image into labels of your own", FIELDS, CANDIDATES, SORTS, drawing="labels", rank=2
    ),
    "image-segmentation": Task(
        "finds the areas of an image",
        FIELDS,
        "mask_threshold overlap_mask_area_threshold subtask threshold",
        hub=Hub(shape=scored),
        drawing="masks",
        lists=("INSTANCE_SEGMENTATION", "UNIVERSAL_SEGMENTATION"),
    ),
    "object-detection": Task(
        "finds objects in an image", FIELDS, "threshold", quick={"threshold": 0.05}, drawing="boxes"
    ),
    "zero-shot-object-detection": Task(
        "finds objects of your own labels in an image",
        FIELDS,
        "candidate_labels threshold top_k",
        SORTS,
        ("candidate_labels",),
        drawing="boxes",
    ),
    "depth-estimation": Task("estimates the depth of an image", FIELDS, drawing="depth"),
    "mask-generation": Task(
        "cuts an image into objects",
        FIELDS,
        "crop_n_points_downscale_factor crop_overlap_ratio crops_n_layers crops_nms_thresh mask_threshold "
        "max_hole_area max_sprinkle_area output_bboxes_mask output_rle_mask points_per_batch points_per_crop "
        "pred_iou_thresh stability_score_offset stability_score_thresh",
        quick={"points_per_crop": 8},
        drawing="masks",
    ),
    "keypoint-matching": Task(
        "finds the points that two images share",
        {"images": "images"},
        "threshold",
        files=2,
    ),
    "document-question-answering": Task(
        "finds the answer to a question in an image of a document",
        {"image": "image", "question": "text", "word_boxes": "json"},
        "doc_stride handle_impossible_answer max_answer_len max_question_len max_seq_len padding top_k",
        noun="pages",
        drawing="labels",
    ),
    "image-to-text": Task(
        "describes images, or reads the text in them",
        FIELDS,
        f"{SAMPLING} {OPTIONS}",
        hub=Hub(describes=True),
        quick={OPTIONS: FEW_TOKENS},
        ends_by=OPTIONS,
        drawing="text",
    ),
    "video-classification": Task(
        "classifies videos",
        {"video": "video"},
        f"{LABELS} frame_sampling_rate num_frames",
        drawing="labels",
    ),
}
