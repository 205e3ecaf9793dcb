"""Models of images, and of texts and images: the models that they become, and what is refused.

tests/conformance/tasks compares their answers with those of transformers.
"""

from __future__ import annotations

import pytest

from tests.support.checkpoints import vision
from tests.support.served import assemble
from triton_transformers.model_config import read_config, with_steps
from triton_transformers.settings import UserError

pytestmark = pytest.mark.usefixtures("stored")


def test_texts_and_images_have_a_model_each_behind_one_front(tmp_path):
    folder = assemble(vision.save_clip(tmp_path / "weights"), tmp_path / "models")
    assert with_steps("m", folder)[:3] == ["m", "m_text", "m_image"]
    front = read_config(folder / "m/config.pbtxt")
    assert front.backend == "text_or_image"
    outputs = {output.name: output.dims for output in front.outputs}
    assert outputs == {"token_count": (1,), "sentence_embedding": (vision.CLIP["projection_dim"],)}


def test_name_of_the_catalogue_is_refused(tmp_path):
    weights = vision.save_clip(tmp_path / "weights")
    with pytest.raises(UserError, match="embedding has a configuration in git, for another task"):
        assemble(weights, tmp_path / "models", system="embedding")
