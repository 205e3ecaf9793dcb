"""Turn texts into tokens and back: prompts, chat templates, long texts."""
