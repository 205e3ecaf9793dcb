"""OpenAI's routes of sound."""

from tests.conformance.apis.run import Case

SOUND = {"model": "whisper", "file": b"RIFF\r\n--\x00\xff\r\n"}
SPEECH = {"model": "speaker", "input": "a", "voice": "default"}
CASES = [
    Case("transcriptions", "/v1/audio/transcriptions", SOUND, is_form=True),
    Case("translations", "/v1/audio/translations", SOUND, is_form=True),
    Case("speech", "/v1/audio/speech", SPEECH),
]
