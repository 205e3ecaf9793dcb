"""Cases of the requests to encoders in the APIs of OpenAI, vLLM and Jina."""

from tests.conformance.apis.run import Case
from tests.support.triton_stand_in import ids_of

DOCUMENTS = ["nothing", "a red house", "red"]
TEXT = {"model": "embedding", "input": "a"}
RANKED = {"model": "reranker", "query": "red", "documents": DOCUMENTS}
LABELLED = {"model": "classifier", "input": "good"}
SCORED = {"model": "reranker", "text_1": "red", "text_2": DOCUMENTS}
CASES = [
    Case("embeddings", "/v1/embeddings", TEXT, many="input"),
    Case("embeddings-short", "/embeddings", TEXT, many="input"),
    Case("rerank", "/v1/rerank", RANKED, many="documents"),
    Case("rerank-short", "/rerank", RANKED, many="documents"),
    Case("hub-rerank", "/models/{model}/rerank", RANKED, "tei", system="reranker", many="documents"),
    Case("classify", "/v1/classify", LABELLED, many="input"),
    Case("classify-short", "/classify", LABELLED, many="input"),
    Case("moderations", "/v1/moderations", LABELLED, many="input"),
    Case("score", "/v1/score", SCORED, many="text_2"),
    Case("score-short", "/score", SCORED, many="text_2"),
    Case("pooling", "/pooling", TEXT, many="input"),
    Case("tokenize", "/tokenize", {"model": "embedding", "prompt": "a"}),
    Case("detokenize", "/detokenize", {"model": "embedding", "tokens": ids_of("a")}),
]
