"""OpenAI's completions and chats, also at the addresses of Hugging Face's Inference API."""

from tests.conformance.apis.run import Case

USER = [{"role": "user", "content": "a"}]
PROMPT = {"model": "counter", "prompt": "a"}
CHAT = {"model": "counter", "messages": USER}
OPENAI = {"form": "openai", "stream": "openai"}
AT = "/models/{model}"

CASES = [
    Case("completions", "/v1/completions", PROMPT, **OPENAI, many="prompt", prompt="prompt"),
    Case("completions-several", "/v1/completions", PROMPT | {"prompt": ["a", "b"], "n": 2}, **OPENAI),
    Case("chat", "/v1/chat/completions", CHAT, **OPENAI, prompt="messages"),
    Case("hub-completions", f"{AT}/v1/completions", {"prompt": "a"}, **OPENAI, system="counter", prompt="prompt"),
    Case("hub-chat", f"{AT}/v1/chat/completions", {"messages": USER}, **OPENAI, system="counter", prompt="messages"),
    Case("hub-chat-short", f"{AT}/chat/completions", {"messages": USER}, **OPENAI, system="counter"),
]
