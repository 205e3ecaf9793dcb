"""Check structured output, and compile it to grammars."""
