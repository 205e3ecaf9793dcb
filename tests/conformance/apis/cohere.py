"""Cohere's chats, embeddings and reranking; its v1 reranking is Jina's (embeddings.py)."""

from tests.conformance.apis.run import Case, Wrong

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

WRONG = [
    Wrong("cohere-chat", {"k": -5}, "k"),
    Wrong("cohere-chat", {"stop_sequences": ["x"] * 17}, "stop_sequences"),
    Wrong("cohere-chat", {"documents": ["a"]}, "documents"),
    Wrong(
        "cohere-chat", {"messages": [{"role": "user", "content": [{"type": "audio"}]}]}, "messages[0].content[0].type"
    ),
    Wrong("cohere-chat", {"messages": [{"role": "chatbot", "content": "a"}]}, "messages[0].role"),
    Wrong("cohere-chat-v1", {"message": "a", "connectors": [{"id": "web-search"}]}, "connectors"),
    Wrong(
        "cohere-chat-v1", {"message": "a", "chat_history": [{"role": "user", "message": "a"}]}, "chat_history[0].role"
    ),
]
