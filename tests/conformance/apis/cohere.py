"""Cohere's chats, embeddings and reranking; its v1 reranking is Jina's (embeddings.py)."""

from tests.conformance.apis.run import Case

CHAT = {"model": "counter", "messages": [{"role": "user", "content": "a"}]}
TEXTS = {"model": "embedding", "texts": ["a"]}
RANKED = {"model": "reranker", "query": "red", "documents": ["nothing", "a red house", "red"]}
CASES = [
    Case("cohere-chat", "/v2/chat", CHAT, "cohere", "cohere v2", prompt="messages"),
    Case("cohere-chat-v1", "/v1/chat", {"model": "counter", "message": "a"}, "cohere", "cohere v1"),
    Case("cohere-embed", "/v2/embed", TEXTS, "cohere", many="texts"),
    Case("cohere-embed-v1", "/v1/embed", TEXTS, "cohere", many="texts"),
    Case("cohere-rerank", "/v2/rerank", RANKED, "cohere", many="documents"),
]
