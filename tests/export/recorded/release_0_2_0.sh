#!/usr/bin/env bash
# Make release_0_2_0.zip: what release 0.2.0 leaves after `make up SYSTEMS="mood story"` and `make down`. That release
# assembles the models, measures the engines of mood and answers two texts in one process, without a server. The
# weights are in the file because today's exporter makes language models anew.
set -euo pipefail
here=$(cd "$(dirname "$0")" && pwd)
python="$(git -C "$here" rev-parse --show-toplevel)/.venv/bin/python"
work=$(mktemp -d)
trap 'git -C "$here" worktree remove --force "$work/release"; rm -rf "$work"' EXIT
git -C "$here" worktree add --quiet --detach "$work/release" e38a2ffe40671a4259aa4acaba7876867642181f
cd "$work/release"
touch "$work/settings"
export TRITON_SETTINGS_NAMES='*' TRITON_SETTINGS_FILE="$work/settings" RUNTIME=local MODEL_REPOSITORY="$work/models"
"$python" - "$work/weights" <<'WEIGHTS'
import sys
from pathlib import Path

from tests.support.checkpoints import encoders, language

folder = Path(sys.argv[1])
encoders.SIZE |= {"hidden_size": 8, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
encoders.save_bert(folder / "mood", "ForSequenceClassification", **encoders.labels(encoders.MOODS))
language.save_gpt2(folder / "story", width=8, layers=1, heads=2)
WEIGHTS
for system in mood story; do
  SYSTEMS=$system SOURCE="$work/weights/$system" "$python" -m triton_transformers.models
done
TRITON_ENGINE_CACHE="$work/state/serving/engines" "$python" - "$work" <<'STATE'
import json
import sys
from pathlib import Path

import numpy as np

from scripts.stack.systems import ServedSystems
from triton_transformers.models.exporters.served import served_system

work, texts = Path(sys.argv[1]), ["What a day!", "No."]
served = ServedSystems(work / "state")
served.write(["mood", "story"])
served.request(["mood", "story"])
with served_system("mood", work / "models", "auto") as models:
    (answer,) = models.alone([{"input_text": np.array([[text.encode()] for text in texts], np.object_)}])
labels = [label.decode() for label in answer["label"].ravel()]
(work / "mood.json").write_text(json.dumps({"texts": texts, "labels": labels, "scores": answer["scores"].tolist()}))
STATE
cd "$work"
rm -f "$here/release_0_2_0.zip"
"$python" -m zipfile -c "$here/release_0_2_0.zip" models state weights/story mood.json
