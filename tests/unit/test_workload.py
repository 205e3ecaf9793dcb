"""What is sent."""

import itertools
import unicodedata

import numpy as np
import pytest
from tritonclient.http import InferenceServerClient, InferInput, InferRequestedOutput

from loadtest.users import Job, Traffic
from loadtest.workload import WORKLOADS, Workload, grpc_request, http_request
from scripts.settings import Settings, UserError


def test_the_corpus_is_varied():
    texts = WORKLOADS["mixed"].texts
    words = [len(text.split()) for text in texts]
    assert len(texts) >= 200
    assert len(set(texts)) == len(texts)
    assert all(text == text.strip() and unicodedata.is_normalized("NFC", text) for text in texts)
    assert min(words) <= 3
    assert 85 <= max(words) <= 110
    scripts = {unicodedata.name(character).split()[0] for text in texts for character in text if character.isalpha()}
    assert scripts >= {"LATIN", "HANGUL", "CJK", "HIRAGANA", "ARABIC", "DEVANAGARI", "CYRILLIC"}


def test_the_published_texts():
    korean, short, long = WORKLOADS["published"].texts
    assert any("HANGUL" in unicodedata.name(c) for c in korean)
    assert (len(short.split()), len(long.split())) == (12, 35)


@pytest.mark.parametrize("text", ["", "plain", "슈퍼 엔저 장기화에…"])
def test_the_http_body_is_what_tritonclient_makes(text):
    tensor = InferInput("input_text", [1, 1], "BYTES")
    tensor.set_data_from_numpy(np.array([[text.encode()]], np.object_))
    theirs, length = InferenceServerClient.generate_request_body(
        [tensor], outputs=[InferRequestedOutput("output__0", binary_data=True)]
    )
    ours = http_request(text)
    assert ours.body[ours.header_length :] == theirs[length:]


def test_the_grpc_request_carries_the_text():
    request = grpc_request("embedding", "한국")
    assert request.raw_input_contents[0][4:].decode() == "한국"
    assert list(request.inputs[0].shape) == [1, 1]


def job(seed):
    return Job("http", "http://127.0.0.1:1", "embedding", WORKLOADS["mixed"].texts, (0.0, 0.0), seed)


def test_the_same_seed_sends_the_same_texts():
    def first_choices(seed):
        shared = Traffic(job(seed))
        return [[shared.new_random().choice(range(240)) for _ in range(5)] for _ in range(3)]

    assert first_choices(1) == first_choices(1) != first_choices(2)


def test_users_of_workers_have_the_streams_that_they_have_in_one_process():
    def streams(count, *numbers):
        traffic = Traffic(job(1), *numbers)
        return [traffic.new_random().random() for _ in range(count)]

    alone, first, second = streams(5), streams(3, itertools.count(0, 2)), streams(2, itertools.count(1, 2))
    assert len(set(alone)) == 5
    assert alone == [first[0], second[0], first[1], second[1], first[2]]


def test_settings_override_the_workload(monkeypatch):
    base = Settings.load() | {"WORKLOAD": "published", "USERS": "", "WAIT": "", "MAX_BATCH": ""}
    published = Workload.of(Settings(base))
    assert (published.users, published.spawn_rate, published.wait, published.max_batch) == (300, 3, (0.1, 0.4), 8)
    changed = Workload.of(Settings(base | {"USERS": "5", "WAIT": "0.5", "MAX_BATCH": "2"}))
    assert (changed.users, changed.wait, changed.max_batch) == (5, (0.5, 0.5), 2)
    for wrong in ("a", "1,2,3", "2,1", "-1"):
        with pytest.raises(UserError, match="WAIT="):
            Workload.of(Settings(base | {"WAIT": wrong}))
